"""The replica state machine against a model of an engine with vLLM's hazards, in any order of calls, failures and
crashes.

The model fails the test when a call would kill a real engine; requests arrive whenever the route says SERVING and
check the engine's true state, not what the controller believes.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from services.engine.domain.engine_state import NATIVE_RELEASE, EngineState
from services.engine.domain.kept import Intent, UpdateKind
from services.engine.domain.replica import Replica
from services.engine.domain.spec import (
    ALL_CACHES,
    KV_CACHE,
    WEIGHTS,
    Cache,
    Flags,
    Gpu,
    Health,
    PauseMode,
    ReplicaSpec,
    Role,
    Route,
    Weights,
)
from services.runtime.errors import TurnoutError

TAGS = frozenset({WEIGHTS, KV_CACHE, "cuda_graph"})


class ModelEngine:
    """What a real engine would be doing."""

    def __init__(self, *, tells: bool, native: bool, starts_by_itself: bool, loaded: bool) -> None:
        self.tells, self.native, self.starts_by_itself = tells, native, starts_by_itself
        self.life = 0
        self.start(loaded)

    def start(self, loaded: bool) -> None:
        """A fresh process."""
        self.life += 1
        self.before_it: list[Call] = []
        self.resident = TAGS
        self.level = 0
        self.paused = False
        self.mode: PauseMode | None = None
        self.running = 0
        self.weights = Weights.INTACT if loaded else Weights.DISCARDED
        self.version = 0
        self.stale: frozenset[Cache] = frozenset()

    def state(self) -> EngineState:
        """A probe."""
        return EngineState(
            declared_tags=TAGS,
            resident_tags=self.resident,
            sleep_level=self.level,
            paused=self.paused,
            pause_mode=self.mode,
            running=self.running,
            capabilities=frozenset({NATIVE_RELEASE}) if self.native else frozenset(),
            weights=self.weights if self.tells else None,
            weight_version=self.version if self.tells else None,
            incarnation=str(self.life),
        )

    def catch_up(self) -> None:
        """Come to the calls that whoever made them gave up."""
        while self.before_it:
            self._carry_out(self.before_it.pop(0))

    def do(self, call: Call) -> None:
        """Carry a call out after those before it, or fail the test where a real engine would die or misbehave."""
        self.catch_up()
        self._carry_out(call)

    def _carry_out(self, call: Call) -> None:
        match call:
            case Pause(mode=mode):
                self.paused, self.mode = True, mode
                if mode is not PauseMode.KEEP:
                    self.running = 0
            case Drain():
                assert self.paused, "requests of an engine that runs never drain"
                self.running = 0
            case Sleep(level=level):
                assert not self.running or self.mode is PauseMode.KEEP, "memory freed under running requests"
                self.resident, self.level = frozenset(), level
                if level == 2:
                    self.weights = Weights.DISCARDED
            case WakeUp(tags=tags):
                assert tags <= TAGS, "a wake with an unknown tag does nothing"
                assert tags
                assert not tags & self.resident, "live memory mapped again"
                self.wake(tags)
            case ReleaseKv():
                assert self.native
                assert self.paused, "memory freed under running requests"
                assert self.resident == TAGS
                self.resident -= {KV_CACHE}
            case ResumeKv():
                assert KV_CACHE not in self.resident
                self.wake(frozenset({KV_CACHE}))
            case ResetCaches(caches=caches):
                self.stale -= caches
            case Resume():
                assert self.resident == TAGS, "scheduling resumed over freed memory"
                self.paused, self.mode = False, None

    def wake(self, tags: frozenset[str]) -> None:
        """Fill memory; some engines start scheduling when all of it is back."""
        self.resident |= tags
        if self.resident == TAGS:
            self.level = 0
            if self.starts_by_itself:
                self.paused, self.mode = False, None

    def write(self) -> None:
        """New weights begin to come."""
        self.catch_up()
        assert WEIGHTS in self.resident, "weights written into memory that is asleep"
        self.weights = Weights.HALF_UPDATED

    def written(self, version: int) -> None:
        """They are complete."""
        self.catch_up()
        assert WEIGHTS in self.resident, "weights written into memory that is asleep"
        self.weights, self.version, self.stale = Weights.INTACT, version, ALL_CACHES

    def fit(self) -> bool:
        """Whether it may run requests."""
        return self.resident == TAGS and self.weights is Weights.INTACT and not self.stale and not self.paused


failures = st.one_of(st.none(), st.none(), st.integers(0, 4))
modes = st.sampled_from([PauseMode.ABORT, PauseMode.WAIT])


class ReplicaMachine(RuleBasedStateMachine):
    """Any life of one replica."""

    @initialize(
        role=st.sampled_from(Role),
        tells=st.booleans(),
        native=st.booleans(),
        by_itself=st.booleans(),
        loaded=st.booleans(),
        mtp=st.booleans(),
        slow=st.booleans(),
    )
    def register(
        self, role: Role, tells: bool, native: bool, by_itself: bool, loaded: bool, mtp: bool, slow: bool
    ) -> None:
        self.engine = ModelEngine(tells=tells, native=native, starts_by_itself=by_itself, loaded=loaded)
        spec = ReplicaSpec(
            "r", role, "model", gpus=(Gpu("n", "g"),), flags=Flags(mtp_rollout=mtp), weights_loaded=loaded
        )
        self.replica = Replica(spec, self.engine.state())
        self.lends = 0
        self.updates = 0
        self.dead = False
        self.slow = slow

    # ----------------------------------------------------------------------------------------------------------
    # helpers

    def know(self) -> None:
        """What a slot does first."""
        if self.replica.uncertain:
            self.replica.observe(self.engine.state())
        assert self.carry_out(self.replica.plan_settle())

    def carry_out(self, plan: Plan, fails_at: int | None = None) -> bool:
        """What a slot does; False if the call with this number failed, or one that a slow engine comes to later."""
        for number, call in enumerate(plan.calls):
            if isinstance(call, Resume) and not self.replica.state.paused:
                continue
            self.replica.attempted(call)
            later = self.slow and fails_at is not None and isinstance(call, Sleep | ReleaseKv)
            if later:
                self.engine.before_it.append(call)
            else:
                self.engine.do(call)
            if later or number == fails_at:
                self.replica.doubt()
                return False
            self.replica.applied(call)
            self.replica.observe(self.engine.state())
            assert self.replica.confirms(call)
        return True

    def attempt(self, make: object, fails_at: int | None) -> bool:
        """Plan and carry out; False if it was refused or failed."""
        if self.dead:
            return False
        self.know()
        try:
            plan = make()  # type: ignore[operator]
        except TurnoutError:
            return False
        return self.carry_out(plan, fails_at)

    # ------------------------------------------------------------------------------------------------------------
    # rules

    @rule(level=st.sampled_from([None, 1, 2]), mode=modes, fails_at=failures)
    def sleep(self, level: int | None, mode: PauseMode, fails_at: int | None) -> None:
        self.attempt(lambda: self.replica.plan_sleep(level, mode), fails_at)

    @rule(tags=st.one_of(st.none(), st.sets(st.sampled_from(sorted(TAGS)), min_size=1)), fails_at=failures)
    def wake(self, tags: set[str] | None, fails_at: int | None) -> None:
        self.attempt(lambda: self.replica.plan_wake(None if tags is None else frozenset(tags)), fails_at)

    @rule(fails_at=failures)
    def release(self, fails_at: int | None) -> None:
        self.attempt(self.replica.plan_release_kv, fails_at)

    @rule(fails_at=failures)
    def refill(self, fails_at: int | None) -> None:
        self.attempt(self.replica.plan_resume_kv, fails_at)

    @rule(mode=st.sampled_from(PauseMode), fails_at=failures)
    def pause(self, mode: PauseMode, fails_at: int | None) -> None:
        self.attempt(lambda: self.replica.plan_pause(mode, True), fails_at)

    @rule(fails_at=failures)
    def resume(self, fails_at: int | None) -> None:
        self.attempt(self.replica.plan_resume, fails_at)

    @rule(caches=st.frozensets(st.sampled_from(Cache)), fails_at=failures)
    def reset(self, caches: frozenset[Cache], fails_at: int | None) -> None:
        self.attempt(lambda: self.replica.plan_reset(caches, True, False), fails_at)

    @precondition(lambda self: self.replica.spec.role is Role.HYBRID)
    @rule(new=st.booleans(), fails_at=failures)
    def begin_lend(self, new: bool, fails_at: int | None) -> None:
        self.lends += new
        if not self.attempt(lambda: self.replica.begin_lend(f"lend-{self.lends}"), fails_at):
            self.replica.fail_lend()

    @precondition(lambda self: self.replica.lend_id)
    @rule(right=st.sampled_from([True, True, False]), fails_at=failures)
    def finish_lend(self, right: bool, fails_at: int | None) -> None:
        version = self.replica.weight_version + (not right)
        if not self.attempt(lambda: self.replica.plan_finish_lend(version), fails_at):
            self.replica.fail_lend()
            return
        assert right
        self.replica.finish_lend()
        assert self.replica.route is Route.SERVING

    @precondition(lambda self: self.replica.spec.role is Role.HYBRID)
    @rule(fails_at=failures)
    def reclaim(self, fails_at: int | None) -> None:
        self.replica.withdraw()
        assert self.replica.route is Route.OUT
        if self.attempt(self.replica.plan_free, fails_at):
            assert self.replica.confirmed_free

    @rule(kind=st.sampled_from(UpdateKind), newer=st.integers(-1, 2), keep=st.booleans(), fails_at=failures)
    def open_update(self, kind: UpdateKind, newer: int, keep: bool, fails_at: int | None) -> None:
        if self.dead or self.replica.uncertain:
            return
        version = self.replica.weight_version + newer
        try:
            self.replica.check_update(kind, version, adapter=False)
        except TurnoutError:
            return
        self.updates += 1
        self.version = version
        ready = self.attempt(lambda: self.replica.open_update(f"u{self.updates}", kind, keep), fails_at)
        if not ready and self.replica.update_id:
            self.abandon(False)

    @precondition(lambda self: self.replica.update_id and not self.dead)
    @rule()
    def touch(self) -> None:
        self.know()
        try:
            self.replica.touch()
        except TurnoutError:
            return
        self.engine.write()

    @precondition(lambda self: self.replica.update_id and not self.dead)
    @rule(fails_at=failures)
    def commit(self, fails_at: int | None) -> None:
        self.know()
        try:
            self.replica.check_commit()
        except TurnoutError:
            return
        self.engine.written(self.version)
        if self.carry_out(self.replica.stamp(self.version, adapter=False), fails_at):
            self.replica.close_update()
            self.replica.observe(self.engine.state())
            assert self.replica.weights is Weights.INTACT
            assert self.replica.cache_version == self.version

    @precondition(lambda self: self.replica.update_id and not self.dead)
    @rule(touched=st.booleans(), fails_at=failures)
    def abandon(self, touched: bool, fails_at: int | None = None) -> None:
        self.know()
        touched = touched or self.engine.weights is Weights.HALF_UPDATED
        self.carry_out(self.replica.plan_abandon(touched), fails_at)

    @rule()
    def vacate(self) -> None:
        self.replica.vacate(self.replica.spec.gpus)

    @rule()
    def catch_up(self) -> None:
        self.engine.catch_up()

    @rule()
    def probe(self) -> None:
        if not self.dead:
            self.replica.answered(self.engine.state())

    @precondition(lambda self: self.engine.tells and not self.dead and not self.replica.update_id)
    @rule()
    def change_weights_past_the_controller(self) -> None:
        """What a trainer's own worker does to an engine."""
        if WEIGHTS in self.engine.resident:
            self.engine.written(self.engine.version + 1)
            self.replica.observe(self.engine.state())

    @rule()
    def hang(self) -> None:
        self.replica.mark_unresponsive()

    @rule()
    def take_over(self) -> None:
        """Another controller, by what the one before kept."""
        self.replica = Replica.restored(self.replica.kept)

    @rule()
    def die(self) -> None:
        self.dead = True
        self.replica.mark_dead()

    @precondition(lambda self: self.dead)
    @rule(loaded=st.booleans())
    def restart(self, loaded: bool) -> None:
        self.engine.start(loaded)
        self.dead = False
        self.replica.answered(self.engine.state())
        assert self.replica.route is not Route.SERVING

    @precondition(lambda self: self.replica.route is Route.SERVING)
    @rule()
    def request(self) -> None:
        assert self.engine.fit()
        self.engine.running += 1

    # -------------------------------------------------------------------------------------------------------
    # invariants

    @invariant()
    def serving_means_fit(self) -> None:
        if not hasattr(self, "replica"):
            return
        replica = self.replica
        if replica.route is Route.SERVING:
            assert not replica.asleep_tags
            assert replica.weights is Weights.INTACT
            assert replica.cache_version == replica.weight_version
            assert not replica.state.paused
            assert replica.health is Health.HEALTHY
            assert replica.intent is Intent.SERVE
            assert self.engine.fit()
            assert not replica.why_not_serving
        else:
            assert replica.why_not_serving

    @invariant()
    def free_means_free(self) -> None:
        if hasattr(self, "replica") and self.replica.confirmed_free:
            assert not self.engine.resident
            assert self.replica.route is not Route.SERVING


TestReplicaMachine = pytest.mark.timeout(120)(ReplicaMachine.TestCase)
TestReplicaMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
