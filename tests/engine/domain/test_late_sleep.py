"""A sleep that was not answered: its engine looks awake until it comes to it."""

from __future__ import annotations

from dataclasses import replace

from services.engine.domain.calls import Pause, Plan, Sleep, WakeUp
from services.engine.domain.engine_state import EngineState
from services.engine.domain.kept import UpdateKind
from services.engine.domain.replica import Replica
from services.engine.domain.spec import KV_CACHE, WEIGHTS, Gpu, PauseMode, ReplicaSpec, Role, Weights

TAGS = frozenset({WEIGHTS, KV_CACHE})
AWAKE = EngineState(
    declared_tags=TAGS,
    resident_tags=TAGS,
    paused=True,
    pause_mode=PauseMode.ABORT,
    incarnation="1",
    weights=Weights.INTACT,
)
ASLEEP = replace(AWAKE, resident_tags=frozenset(), weights=None)
SPEC = ReplicaSpec("r", Role.HYBRID, "model", gpus=(Gpu("n", "g"),), weights_loaded=True)
BARRIER = Plan((Pause(PauseMode.ABORT, False),))


def told(level: int, seen: EngineState) -> Replica:
    """A replica that an earlier controller told to sleep; `seen` is what the first probe told the present one."""
    before = Replica(SPEC, AWAKE)
    before.attempted(Sleep(level))
    replica = Replica.restored(before.kept)
    replica.observe(seen)
    return replica


def test_an_engine_that_looks_awake_has_to_answer_behind_the_sleep() -> None:
    """Weights were written to an engine that went to sleep before they came."""
    replica = told(1, AWAKE)
    assert replica.plan_settle() == BARRIER
    replica.observe(AWAKE)
    assert replica.plan_settle() == BARRIER, "a probe does not queue behind a sleep"
    replica.attempted(Pause(PauseMode.ABORT))
    replica.applied(Pause(PauseMode.ABORT))
    replica.observe(ASLEEP)
    assert replica.plan_settle() == Plan()
    assert WakeUp(frozenset({WEIGHTS})) in replica.open_update("u", UpdateKind.ASLEEP, False).calls


def test_an_engine_that_sleeps_schedules_or_is_another_one_is_asked_nothing() -> None:
    """A pause for nothing stops an engine that serves."""
    assert told(1, ASLEEP).plan_settle() == Plan()
    assert told(1, replace(AWAKE, paused=False)).plan_settle() == Plan()
    assert told(1, replace(AWAKE, incarnation="2")).plan_settle() == Plan()
    assert Replica(SPEC, AWAKE).plan_settle() == Plan()


def test_weights_may_be_gone_until_the_sleep_is_over() -> None:
    """Two controllers later the engine slept, told nothing of weights, and was taken to have them."""
    replica = told(2, AWAKE)
    assert replica.weights is Weights.INTACT
    assert replica.kept.weights is Weights.DISCARDED
    later = Replica.restored(replica.kept)
    later.observe(ASLEEP)
    assert later.weights is Weights.DISCARDED
