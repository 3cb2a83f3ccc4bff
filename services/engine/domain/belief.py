"""What the controller believes of one replica, and what follows from it.

Invariants: the route is derived, never set: a replica serves only while it is meant to, its engine is healthy and
running, every declared tag is resident, its weights are intact and its caches are as new as its weights. What an engine
told last (`observe`) wins over what was believed. A replica whose engine died or was replaced counts as without weights
until a full update succeeds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Self

from services.engine.domain.calls import (
    Call,
    Pause,
    ReleaseKv,
    ResetCaches,
    Resume,
    ResumeKv,
    Sleep,
    WakeUp,
)
from services.engine.domain.engine_state import EngineState
from services.engine.domain.kept import Intent, Kept, UpdateKind
from services.engine.domain.roles import keeps_memory
from services.engine.domain.spec import (
    ALL_CACHES,
    KV_CACHE,
    WEIGHTS,
    Cache,
    Gpu,
    Health,
    ReplicaSpec,
    Role,
    Route,
    Weights,
)
from services.runtime.errors import TurnoutError, failed_precondition

TEMPORARY: Final = frozenset({"UPDATE_OPEN", "TAG_ASLEEP", "CACHE_OLDER_THAN_WEIGHTS", "PAUSED"})
"""Blockers that whoever caused them will lift: requests wait for such a replica. The others send them elsewhere."""

SENTENCES: Final = {
    "ENGINE_DEAD": "its engine process is gone",
    "ENGINE_UNRESPONSIVE": "its engine does not answer in time",
    "STATE_UNKNOWN": "its engine was not probed since a call to it failed or the controller started",
    "UPDATE_OPEN": "a weight update is open on it",
    "TAG_ASLEEP": "some of its memory is asleep",
    "WEIGHTS_DISCARDED": "it has no weights; a full weight update is needed",
    "WEIGHTS_HALF_UPDATED": "a weight update began and did not commit; a full one is needed",
    "CACHE_OLDER_THAN_WEIGHTS": "its caches were filled under older weights; reset them",
    "REPLICA_LENDING": "a lend is open and not finished",
    "PAUSED": "it is paused",
    "NOT_LENT": "its GPUs are the trainer's",
}


class Belief:
    """The state of one replica."""

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
        self._may_discard = False
        self._may_wake = False
        self._may_sleep = False
        self._started_anew = False
        self.observe(state)

    # ------------------------------------------------------------------------------------------------ what is kept

    @property
    def kept(self) -> Kept:
        """What has to outlive the controller."""
        return Kept(
            spec=self.spec,
            weights=Weights.DISCARDED if self._may_discard else self.weights,
            weight_version=self.weight_version,
            adapter_version=self.adapter_version,
            cache_version=self.cache_version,
            stale_caches=self.stale_caches,
            intent=self.intent,
            lend_id=self.lend_id,
            update_id=self.update_id,
            update_kind=self.update_kind,
            unvacated=self.unvacated,
            must_load=self.must_load,
            before_update=self._before_update,
            released_kv=self._released_kv,
            engine_incarnation=self.state.incarnation,
            declared_tags=self.state.declared_tags,
            may_wake=self._may_wake,
            may_sleep=self._may_sleep,
            started_anew=self._started_anew,
        )

    @classmethod
    def restored(cls, kept: Kept) -> Self:
        """A replica as an earlier controller knew it. Until its engine is probed it is good for nothing."""
        unknown = EngineState(
            declared_tags=kept.declared_tags,
            resident_tags=frozenset(),
            paused=True,
            incarnation=kept.engine_incarnation,
        )
        # The version that counts is the one that is kept; the one of the registration was checked then.
        replica = cls(replace(kept.spec, weight_version=None), unknown)
        replica.spec = kept.spec
        replica.weights = kept.weights
        replica.weight_version = kept.weight_version
        replica.adapter_version = kept.adapter_version
        replica.cache_version = kept.cache_version
        replica.stale_caches = kept.stale_caches
        replica.intent = kept.intent
        replica.lend_id = kept.lend_id
        replica.update_id = kept.update_id
        replica.update_kind = kept.update_kind
        replica.unvacated = kept.unvacated
        replica.must_load = kept.must_load
        replica._before_update = kept.before_update
        replica._released_kv = kept.released_kv
        replica._may_wake = kept.may_wake
        replica._may_sleep = kept.may_sleep
        replica._may_discard = kept.may_sleep and kept.weights is Weights.DISCARDED
        replica._started_anew = kept.started_anew
        replica.health = Health.UNRESPONSIVE
        replica.uncertain = True
        return replica

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
        if self.health is not Health.HEALTHY or self.uncertain or self._may_wake:
            return False
        if keeps_memory(self.spec) is not None:
            return self.state.paused and self.state.running == 0
        return self.fully_asleep

    @property
    def stray(self) -> bool:
        """Whether its engine was started by somebody else, and takes memory of GPUs that are the trainer's."""
        if not self._started_anew or self.spec.role is not Role.HYBRID:
            return False
        if self.intent is not Intent.OUT or self.lend_id or self.update_id:
            return False
        return self.health is Health.HEALTHY and not self.uncertain and not self.confirmed_free

    # ------------------------------------------------------------------------------------------- what engines tell

    def observe(self, state: EngineState) -> None:
        """Take over what a probe told; it came from a healthy engine."""
        replaced = bool(self.state.incarnation) and state.incarnation != self.state.incarnation
        self.state = state
        self.uncertain = False
        if replaced:
            self._lose_weights()
            self._may_wake = self._may_sleep = False
            self._started_anew = True
            # The new engine knows nothing of an update, nor of the bytes that the former one got.
            self.close_update()
        dropped = WEIGHTS not in state.resident_tags and (state.sleep_level == 2 or self._may_discard)
        self._may_discard &= self._may_sleep
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
        if self.health is Health.DEAD:
            self._started_anew = True
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

    def arrived_late(self) -> None:
        """It was registered when the run's hybrids were lent before: nobody waits for its memory to be awake."""
        self._started_anew = True

    def _lose_weights(self) -> None:
        self.must_load = True
        self._discard()

    def _discard(self) -> None:
        self.weights = Weights.DISCARDED
        self._before_update = Weights.DISCARDED

    def attempted(self, call: Call) -> None:
        """A call is about to be made: what it may bring about counts from now on.

        No request may be sent to an engine that is about to pause, and weights may be gone that are about to be
        dropped. An engine that was told to refill or to free memory may come to that when whoever told it is long
        dead; it carries commands out in order, so once it has gone to sleep after a wake, or has answered anything
        after a sleep, it has done it.
        """
        match call:
            case Pause(mode=mode):
                self.state = replace(self.state, paused=True, pause_mode=mode)
            case Sleep(level=level):
                self._may_sleep = True
                self._may_discard = self._may_discard or level == 2
            case ReleaseKv():
                self._may_sleep = True
            case WakeUp() | ResumeKv():
                self._may_wake = True
                self._started_anew = False
            case Resume():
                self._started_anew = False
            case _:
                pass

    def applied(self, call: Call) -> None:
        """The engine confirmed a call."""
        self._may_sleep = False
        match call:
            case Sleep(level=level):
                self._may_wake = False
                self._started_anew = False
                if level == 2:
                    self._discard()
                if not self.update_id:
                    self._released_kv = False
            case WakeUp() | ResumeKv():
                self._may_wake = False
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

    def close_update(self) -> None:
        """The update is over for this replica, well or badly."""
        self.update_id = ""

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
