"""How a replica receives new weights.

Invariants: no weights are written into memory that is asleep; a replica that bytes have reached serves again only after
a commit, its caches emptied; one that none has reached goes on with its old weights.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.engine.domain.calls import (
    Call,
    Pause,
    Plan,
    Resume,
    ResumeKv,
    WakeUp,
)
from services.engine.domain.kept import UpdateKind
from services.engine.domain.memory_plans import MemoryPlans
from services.engine.domain.roles import keeps_memory, kv_skip
from services.engine.domain.spec import (
    ALL_CACHES,
    KV_CACHE,
    WEIGHTS,
    Gpu,
    PauseMode,
    Role,
    Route,
    Weights,
)


class UpdatePlans(MemoryPlans):
    """The steps of a weight update."""

    def check_update(self, kind: UpdateKind, version: int, *, adapter: bool, allow_older: bool = False) -> None:
        """Refuse an update that cannot begin."""
        self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
        held = self.adapter_version if adapter else self.held_version
        if held is not None and version < held and not allow_older:
            raise self._refusal(
                "VERSION_OLDER",
                f"it holds version {held}, {version} is older",
                field="weight_version",
                value=version,
                current=held,
            )
        if kind is UpdateKind.ASLEEP and self.route is Route.SERVING:
            raise self._refusal("REPLICA_SERVING", "it serves requests: use kind AWAKE", field="kind")

    def open_update(self, update_id: str, kind: UpdateKind, keep: bool) -> Plan:
        """Take part in a weight update; the plan makes it ready to receive. The same update again goes on with it."""
        again = self.update_id == update_id
        memory_stays = keeps_memory(self.spec) is not None
        if kind is UpdateKind.AWAKE:
            releases = kv_skip(self.spec) is None and KV_CACHE in self.state.resident_tags
            # An engine gives up KV alone only while everything else is resident.
            self._refuse_if(WEIGHTS in self.asleep_tags or (releases and bool(self.asleep_tags)), "TAG_ASLEEP")
            if keep and not self.state.paused:
                calls: tuple[Call, ...] = (Pause(PauseMode.KEEP),)
            else:
                calls = self._quiesce(PauseMode.ABORT)
            if releases:
                self._released_kv = True
                calls = (*calls, *self._release().calls)
        else:
            calls = self._quiesce(PauseMode.ABORT)
            if not memory_stays and WEIGHTS in self.asleep_tags:
                calls = (*calls, WakeUp(frozenset({WEIGHTS})))
            if self.spec.role is Role.HYBRID and not again:
                self.unvacated = frozenset(self.spec.gpus)
        self.update_id = update_id
        self.update_kind = kind
        self._started_anew = False
        if not again:
            self._before_update = self.weights
        return Plan(calls)

    def touch(self) -> None:
        """The first byte of new weights is on its way."""
        self._refuse_if(WEIGHTS in self.asleep_tags, "TAG_ASLEEP")
        self.weights = Weights.HALF_UPDATED

    def vacate(self, gpus: Iterable[Gpu]) -> None:
        """The trainer freed memory on these GPUs."""
        self.unvacated -= frozenset(gpus)

    def check_commit(self) -> None:
        """Refuse to stamp weights on memory that is asleep."""
        self._refuse_if(WEIGHTS in self.asleep_tags, "TAG_ASLEEP")

    def stamp(self, version: int, adapter: bool) -> Plan:
        """All weights have arrived: what has to be called before the update can be closed."""
        if adapter:
            self.adapter_version = version
            self.weights = self._before_update
        else:
            self.weight_version = version
            self.weights = Weights.INTACT
            self.must_load = False
        self._before_update = self.weights
        self.stale_caches = ALL_CACHES
        if self.update_kind is UpdateKind.ASLEEP:
            return Plan((self._full_reset(),))
        refill, start = self._go_on()
        return Plan((*refill, self._full_reset(), *start))

    def plan_abandon(self, touched: bool) -> Plan:
        """Close an update that did not commit. Untouched replicas go on with their old weights."""
        kind = self.update_kind
        self.close_update()
        if touched:
            self.weights = Weights.HALF_UPDATED
            return Plan()
        self.weights = self._before_update
        if kind is UpdateKind.ASLEEP or self.lending:
            return Plan()
        refill, start = self._go_on()
        fit = self.weights is Weights.INTACT and not self.stale_caches
        return Plan((*refill, *start) if fit else refill)

    def _go_on(self) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """The calls that refill what an AWAKE update freed, and those that start scheduling again."""
        asleep = self.asleep_tags
        if asleep and not self._released_kv:
            return (), ()
        refill: tuple[Call, ...] = ()
        if asleep:
            # Where KV is released by sleep and wake, that can have failed half-way, with more than KV asleep.
            refill = (ResumeKv(),) if asleep == {KV_CACHE} else (WakeUp(asleep),)
        return refill, () if self.lending else (Resume(),)
