"""One replica as a state machine.

Invariants: the route is derived, never set: a replica serves only while it is meant to, its engine is healthy and
running, every declared tag is resident, its weights are intact and its caches are as new as its weights. A plan is
made, or refused, before anything reaches an engine. What an engine told last (`observe`) wins over what was believed.
A replica whose engine died or was replaced counts as without weights until a full update succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from services.engine.domain.calls import (
    Call,
    Drain,
    Pause,
    Plan,
    ReleaseKv,
    ResetCaches,
    Resume,
    ResumeKv,
    Sleep,
    WakeUp,
)
from services.engine.domain.roles import keeps_memory, kv_skip, sleep_level, sleep_skip, wake_tags
from services.engine.domain.spec import (
    ALL_CACHES,
    KV_CACHE,
    WEIGHTS,
    Cache,
    Gpu,
    Health,
    PauseMode,
    ReplicaSpec,
    Role,
    Route,
    Weights,
)
from services.runtime.errors import TurnoutError, failed_precondition, invalid_argument

NATIVE_RELEASE: Final = "release_kv_cache"
"""Capability of engines that can free KV memory alone."""

TEMPORARY: Final = frozenset({"UPDATE_OPEN", "TAG_ASLEEP", "CACHE_OLDER_THAN_WEIGHTS", "PAUSED"})
"""Blockers that whoever caused them will lift: requests wait for such a replica. The others send them elsewhere."""

SENTENCES: Final = {
    "ENGINE_DEAD": "its engine process is gone",
    "ENGINE_UNRESPONSIVE": "its engine does not answer in time",
    "STATE_UNKNOWN": "a call to its engine failed and it was not probed since",
    "UPDATE_OPEN": "a weight update is open on it",
    "TAG_ASLEEP": "some of its memory is asleep",
    "WEIGHTS_DISCARDED": "it has no weights; a full weight update is needed",
    "WEIGHTS_HALF_UPDATED": "a weight update began and did not commit; a full one is needed",
    "CACHE_OLDER_THAN_WEIGHTS": "its caches were filled under older weights; reset them",
    "REPLICA_LENDING": "a lend is open and not finished",
    "PAUSED": "it is paused",
    "NOT_LENT": "its GPUs are the trainer's",
}


class Intent(Enum):
    """What a replica is meant to do with requests."""

    OUT = "out"
    HOLD = "hold"
    SERVE = "serve"


class UpdateKind(Enum):
    """In what state a replica receives weights."""

    AWAKE = "awake"
    ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class EngineState:
    """What a probe of an engine told.

    `weights`, `weight_version` and `memory_bytes` are None where the engine cannot tell. `incarnation` differs
    between two processes of an engine; empty where it cannot tell.
    """

    declared_tags: frozenset[str]
    resident_tags: frozenset[str]
    sleep_level: int = 0
    paused: bool = False
    pause_mode: PauseMode | None = None
    running: int = 0
    capabilities: frozenset[str] = frozenset()
    weights: Weights | None = None
    weight_version: int | None = None
    adapter_version: int | None = None
    memory_bytes: int | None = None
    incarnation: str = ""


class Replica:
    """The state of one replica, and what may be done with it."""

    def __init__(self, spec: ReplicaSpec, state: EngineState) -> None:
        self.spec = spec
        self.health = Health.HEALTHY
        self.state = state
        self.intent = Intent.OUT if spec.role is Role.HYBRID else Intent.SERVE
        self.lend_id = ""
        self.update_id = ""
        self.update_kind = UpdateKind.AWAKE
        self.unvacated: frozenset[Gpu] = frozenset()
        self.uncertain = False
        self.must_load = not spec.weights_loaded
        self.adapter_version: int | None = None
        if spec.weight_version is not None and state.weight_version not in (None, spec.weight_version):
            raise failed_precondition(
                "VERSION_MISMATCH",
                f"{spec.replica_id}: its engine holds version {state.weight_version}, not {spec.weight_version}",
                replica_id=spec.replica_id,
                field="spec.weight_version",
                value=spec.weight_version,
                current=state.weight_version,
            )
        told = state.weight_version if state.weight_version is not None else spec.weight_version
        self.weight_version = told or 0
        self.cache_version = self.weight_version
        self.stale_caches: frozenset[Cache] = frozenset()
        self.weights = Weights.DISCARDED if self.must_load else Weights.INTACT
        self._before_update = self.weights
        self._cleared_pause = False
        self._released_kv = False
        self.observe(state)

    # ------------------------------------------------------------------------------------------------ what is known

    @property
    def replica_id(self) -> str:
        return self.spec.replica_id

    @property
    def asleep_tags(self) -> frozenset[str]:
        return self.state.declared_tags - self.state.resident_tags

    @property
    def held_version(self) -> int | None:
        """Version of the base weights, None while there are none, or a mixture."""
        return self.weight_version if self.weights is Weights.INTACT else None

    @property
    def fully_asleep(self) -> bool:
        return not self.state.resident_tags

    @property
    def lending(self) -> bool:
        """Whether it takes part in a lend that is not finished for it."""
        return bool(self.lend_id) and self.intent is not Intent.SERVE

    def blocker(self) -> str:
        """UPPER_SNAKE reason why the engine must not run requests now; empty if it may (and does)."""
        return self._unfit() or ("PAUSED" if self.state.paused else "")

    def _unfit(self) -> str:
        if self.health is Health.DEAD:
            return "ENGINE_DEAD"
        if self.health is Health.UNRESPONSIVE:
            return "ENGINE_UNRESPONSIVE"
        if self.uncertain:
            return "STATE_UNKNOWN"
        if self.update_id:
            return "UPDATE_OPEN"
        if self.asleep_tags:
            return "TAG_ASLEEP"
        if self.weights is Weights.DISCARDED:
            return "WEIGHTS_DISCARDED"
        if self.weights is Weights.HALF_UPDATED:
            return "WEIGHTS_HALF_UPDATED"
        if self.stale_caches:
            return "CACHE_OLDER_THAN_WEIGHTS"
        return ""

    @property
    def route(self) -> Route:
        if self.intent is Intent.OUT or self.health is not Health.HEALTHY:
            return Route.OUT
        if self.intent is Intent.HOLD:
            return Route.OUT if self.uncertain else Route.HELD
        blocker = self.blocker()
        if not blocker:
            return Route.SERVING
        mending = bool(self.update_id) or self.weights is Weights.INTACT
        return Route.HELD if mending and blocker in TEMPORARY else Route.OUT

    @property
    def why_not_serving(self) -> str:
        """One sentence; empty if it serves."""
        if self.route is Route.SERVING:
            return ""
        if self.intent is Intent.HOLD and self.health is Health.HEALTHY:
            return SENTENCES["REPLICA_LENDING"]
        return SENTENCES[self.blocker() or "NOT_LENT"]

    @property
    def confirmed_free(self) -> bool:
        """Whether the trainer may use its GPUs, as the engine told last."""
        if self.spec.role is Role.STANDALONE or self.lend_id or self.update_id:
            return False
        if self.health is not Health.HEALTHY or self.uncertain:
            return False
        if keeps_memory(self.spec) is not None:
            return self.state.paused and self.state.running == 0
        return self.fully_asleep

    # ------------------------------------------------------------------------------------------- what engines tell

    def observe(self, state: EngineState) -> None:
        """Take over what a probe told; it came from a healthy engine."""
        replaced = bool(self.state.incarnation) and state.incarnation != self.state.incarnation
        self.state = state
        self.uncertain = False
        if replaced:
            self._lose_weights()
        dropped = state.sleep_level == 2 and WEIGHTS not in state.resident_tags
        if state.weights is Weights.DISCARDED or dropped:
            self._discard()
        if self.update_id:
            return  # the rest of what an engine tells in the middle of an update is settled at its end
        if state.weights is not None:
            self.weights = Weights.DISCARDED if self.must_load else state.weights
        if state.weight_version is not None and state.weight_version != self.weight_version and not self.must_load:
            self.weight_version = state.weight_version
            self.stale_caches = ALL_CACHES
        self.health = Health.HEALTHY

    def answered(self, state: EngineState) -> None:
        """The engine answers again."""
        self.health = Health.HEALTHY
        self.observe(state)

    def mark_unresponsive(self) -> None:
        """The engine is connected and does not answer in time."""
        if self.health is not Health.DEAD:
            self.health = Health.UNRESPONSIVE

    def mark_dead(self) -> None:
        """The engine's process is gone, and its weights with it."""
        self.health = Health.DEAD
        self._lose_weights()

    def _lose_weights(self) -> None:
        self.must_load = True
        self._discard()

    def _discard(self) -> None:
        self.weights = Weights.DISCARDED
        self._before_update = Weights.DISCARDED

    def attempted(self, call: Call) -> None:
        """A call is about to be made. From now on no request may be sent to an engine that is about to pause."""
        if isinstance(call, Pause):
            self.state = replace(self.state, paused=True, pause_mode=call.mode)

    def applied(self, call: Call) -> None:
        """The engine confirmed a call."""
        match call:
            case Sleep(level=level):
                if level == 2:
                    self._discard()
                if not self.update_id:
                    self._released_kv = False
            case Pause(clear_cache=cleared):
                self._cleared_pause = cleared
            case ResetCaches(caches=caches):
                self.stale_caches -= caches
                if not self.stale_caches:
                    self.cache_version = self.weight_version
            case _:
                pass

    def confirms(self, call: Call) -> bool:
        """Whether the engine, as it told last, is where a call was to bring it."""
        resident = self.state.resident_tags
        match call:
            case Pause():
                return self.state.paused
            case Resume():
                return not self.state.paused
            case Sleep():
                return not resident
            case WakeUp(tags=tags):
                return tags <= resident
            case ReleaseKv():
                return KV_CACHE not in resident
            case ResumeKv():
                return KV_CACHE in resident
            case _:
                return True

    def doubt(self) -> None:
        """A call failed, so that nobody knows what the engine did; until a probe it counts as able to nothing."""
        self.uncertain = True

    # ---------------------------------------------------------------------------------------------- memory and pause

    def plan_sleep(self, asked: int | None, mode: PauseMode) -> Plan:
        """Free all memory; `asked` is 1, 2 or None for AUTO."""
        skip = sleep_skip(self.spec)
        if skip is not None:
            return Plan(skipped=skip)
        self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
        level = sleep_level(self.spec, asked)
        if self.fully_asleep:
            if self.state.sleep_level == level:
                return Plan()
            raise self._refusal(
                "ASLEEP_AT_OTHER_LEVEL", f"it sleeps at level {self.state.sleep_level}, not {level}", level=level
            )
        return Plan((*self._quiesce(mode), *self._put_to_sleep(level)))

    def plan_wake(self, asked: frozenset[str] | None) -> Plan:
        """Refill memory; None is all tags."""
        skip = sleep_skip(self.spec)
        if skip is not None:
            return Plan(skipped=skip)
        tags = wake_tags(self.spec, self.state.declared_tags, asked)
        self.check_tags(tags)
        missing = tags & self.asleep_tags
        if not missing:
            return Plan()
        if missing != {WEIGHTS}:
            self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
            self._refuse_if_not_vacated()
        return Plan((WakeUp(missing), ResetCaches(frozenset({Cache.PREFIX}), reset_connectors=True)))

    def check_tags(self, tags: Iterable[str]) -> None:
        """Refuse tags that the engine does not declare."""
        unknown = sorted(set(tags) - self.state.declared_tags)
        if unknown:
            declared = ", ".join(sorted(self.state.declared_tags))
            raise invalid_argument(
                "tags",
                f"{self.replica_id} has no tag {unknown[0]!r}; it declares {declared}",
                value=unknown[0],
                reason="UNKNOWN_TAG",
                replica_id=self.replica_id,
            )

    def plan_release_kv(self) -> Plan:
        """Free KV memory and keep the weights."""
        skip = kv_skip(self.spec)
        if skip is not None:
            return Plan(skipped=skip)
        if KV_CACHE not in self.state.resident_tags:
            return Plan()
        if not self.state.paused:
            raise self._refusal("NOT_PAUSED", "pause it before its KV memory is freed")
        self._refuse_if(bool(self.asleep_tags), "TAG_ASLEEP")
        recomputes = self.state.pause_mode is PauseMode.KEEP and self._cleared_pause
        if self.state.running and not recomputes:
            raise self._refusal("NOT_DRAINED", f"{self.state.running} requests still hold KV memory")
        return self._release()

    def plan_resume_kv(self) -> Plan:
        """Refill KV memory."""
        skip = kv_skip(self.spec)
        if skip is not None:
            return Plan(skipped=skip)
        if KV_CACHE in self.state.resident_tags:
            return Plan()
        self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
        self._refuse_if_not_vacated()
        if self.asleep_tags != {KV_CACHE}:
            raise self._refusal("TAG_ASLEEP", "other tags than kv_cache are asleep: wake it up")
        return Plan((ResumeKv(),))

    def plan_pause(self, mode: PauseMode, clear_cache: bool) -> Plan:
        """Stop scheduling."""
        if not self.state.paused:
            stop = Pause(mode, clear_cache)
            return Plan((stop,) if mode is PauseMode.KEEP else (stop, Drain()))
        now = self.state.pause_mode
        if now is not None and now is not mode:
            raise self._refusal("PAUSED_IN_OTHER_MODE", f"it is paused in mode {now.value}", current=now.value)
        return Plan()

    def plan_resume(self) -> Plan:
        """Start scheduling."""
        self._refuse_unless_fit()
        self._refuse_if(self.lending, "REPLICA_LENDING")
        return Plan((Resume(),)) if self.state.paused else Plan()

    def plan_reset(self, caches: frozenset[Cache], running: bool, connectors: bool) -> Plan:
        """Empty caches; an empty set is all of them."""
        return Plan((ResetCaches(caches or ALL_CACHES, running, connectors),))

    # ----------------------------------------------------------------------------------------------------- lending

    def begin_lend(self, lend_id: str) -> Plan:
        """Take part in a lend: requests are held for it, and its weight memory is refilled."""
        if self.lend_id and self.lend_id != lend_id:
            raise self._refusal("LEND_OPEN", f"lend {self.lend_id!r} is open", lend_id=self.lend_id)
        if not self.lend_id:
            self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
            self.lend_id = lend_id
        if self.intent is Intent.OUT:
            self.intent = Intent.HOLD
        if keeps_memory(self.spec) is not None or WEIGHTS in self.state.resident_tags:
            return Plan()
        return Plan((WakeUp(frozenset({WEIGHTS})),))

    def plan_finish_lend(self, weight_version: int) -> Plan:
        """What has to happen before it serves under `weight_version`."""
        self._refuse_if(bool(self.update_id), "UPDATE_OPEN")
        if keeps_memory(self.spec) is None:
            self._refuse_if(WEIGHTS in self.asleep_tags, "TAG_ASLEEP")
        self._refuse_if(self.weights is Weights.DISCARDED, "WEIGHTS_DISCARDED")
        self._refuse_if(self.weights is Weights.HALF_UPDATED, "WEIGHTS_HALF_UPDATED")
        if self.weight_version != weight_version:
            raise self._refusal(
                "VERSION_MISMATCH",
                f"it holds weight version {self.weight_version}, not {weight_version}",
                field="weight_version",
                value=weight_version,
                current=self.weight_version,
            )
        self._refuse_if_not_vacated()
        if self.intent is Intent.SERVE and not self.blocker():
            return Plan()
        wake: tuple[Call, ...] = (WakeUp(self.asleep_tags),) if self.asleep_tags else ()
        return Plan((*wake, self._full_reset(), Resume()))

    def finish_lend(self) -> None:
        """It serves from now on; refused unless its engine really may."""
        blocker = self.blocker()
        self._refuse_if(bool(blocker), blocker)
        self.intent = Intent.SERVE

    def fail_lend(self) -> None:
        """A step of the lend failed here: requests must not wait for it. Repeating the step makes it good."""
        if self.intent is Intent.HOLD:
            self.intent = Intent.OUT

    def withdraw(self) -> None:
        """Give its GPUs back to the trainer: no request goes there, its lend is closed, an update abandoned."""
        self.intent = Intent.OUT
        self.lend_id = ""
        self.unvacated = frozenset()
        if self.update_id:
            self.close_update()

    def plan_free(self) -> Plan:
        """What has to happen before the trainer may use its GPUs, after `withdraw`."""
        if self.confirmed_free:
            return Plan()
        quiesce = self._quiesce(PauseMode.ABORT)
        if keeps_memory(self.spec) is not None:
            return Plan(quiesce)
        return Plan((*quiesce, *self._put_to_sleep(sleep_level(self.spec, None))))

    # -------------------------------------------------------------------------------------------------- weight updates

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
        """Take part in a weight update; the plan makes it ready to receive."""
        memory_stays = keeps_memory(self.spec) is not None
        if kind is UpdateKind.AWAKE:
            self._refuse_if(WEIGHTS in self.asleep_tags, "TAG_ASLEEP")
            if keep and not self.state.paused:
                calls: tuple[Call, ...] = (Pause(PauseMode.KEEP),)
            else:
                calls = self._quiesce(PauseMode.ABORT)
            if kv_skip(self.spec) is None and KV_CACHE in self.state.resident_tags:
                self._released_kv = True
                calls = (*calls, *self._release().calls)
        else:
            calls = self._quiesce(PauseMode.ABORT)
            if not memory_stays and WEIGHTS in self.asleep_tags:
                calls = (*calls, WakeUp(frozenset({WEIGHTS})))
            if self.spec.role is Role.HYBRID:
                self.unvacated = frozenset(self.spec.gpus)
        self.update_id = update_id
        self.update_kind = kind
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

    def close_update(self) -> None:
        """The update is over for this replica, well or badly."""
        self.update_id = ""

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

    # ------------------------------------------------------------------------------------------------------- helpers

    def _quiesce(self, mode: PauseMode) -> tuple[Call, ...]:
        if self.fully_asleep:
            return ()
        if not self.state.paused:
            return (Pause(mode), Drain())
        if mode is not PauseMode.ABORT and self.state.pause_mode is PauseMode.KEEP and self.state.running:
            raise self._refusal("PAUSED_IN_OTHER_MODE", "it is paused in mode keep: its requests would never end")
        return (Drain(),)

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

    def _put_to_sleep(self, level: int) -> tuple[Call, ...]:
        if self.spec.role is Role.HYBRID:
            return (Sleep(level), ResetCaches(frozenset({Cache.ENCODER})))
        return (Sleep(level),)

    def _release(self) -> Plan:
        if NATIVE_RELEASE in self.state.capabilities:
            return Plan((ReleaseKv(),), method="native")
        others = self.state.declared_tags - {KV_CACHE}
        return Plan((Sleep(sleep_level(self.spec, None)), WakeUp(others)), method="sleep_wake")

    def _full_reset(self) -> ResetCaches:
        return ResetCaches(ALL_CACHES, reset_running_requests=True, reset_connectors=True)

    def _refuse_unless_fit(self) -> None:
        unfit = self._unfit()
        self._refuse_if(bool(unfit), unfit)

    def _refuse_if_not_vacated(self) -> None:
        if self.unvacated:
            gpu = min(self.unvacated)
            raise self._refusal(
                "NOT_VACATED", "the trainer has not reported its memory vacated", node=gpu.node, uuid=gpu.uuid
            )

    def _refuse_if(self, wrong: bool, reason: str) -> None:
        if wrong:
            raise self._refusal(reason, SENTENCES[reason])

    def _refusal(self, reason: str, why: str, **metadata: object) -> TurnoutError:
        return failed_precondition(reason, f"{self.replica_id}: {why}", replica_id=self.replica_id, **metadata)
