"""`shadow:<policy>`."""

import pytest

from services.scheduler.policies import IncompatibleError, create
from services.scheduler.policies.types import (
    Action,
    DepthObserved,
    LendDone,
    Point,
    ReclaimDone,
    RunConfig,
    StepBegan,
    StepEnded,
)
from services.simulator import load, simulate
from tests.scheduler.policies.drive import RUN, Drive, configured


def test_verl_acts_and_the_shadow_is_heard() -> None:
    """A shadow that acted would be an experiment nobody asked for."""
    drive, verl = Drive("shadow:off", configured()), Drive("verl", configured())
    for each in (drive, verl):
        each.lend_done()
        each.reclaim_done()
    heard, alone = drive.step(1, wait_s=48.0, missing=16), verl.step(1, wait_s=48.0, missing=16)
    assert heard.action is alone.action is Action.LEND
    assert heard.threshold == alone.threshold
    assert heard.numbers["shadow_action"] == 0.0
    assert heard.numbers["shadow_differs"] == 1.0
    assert {name: heard.numbers[name] for name in alone.numbers} == dict(alone.numbers)
    assert heard.reason == f"{alone.reason} In the shadow off would keep: Switching is off."


def test_while_switching_is_off_the_shadow_still_says_what_it_would_do() -> None:
    """That is how a user learns the gain before anything moves."""
    drive = Drive("shadow:verl", configured(enable_switch=False))
    decision = drive.step(1, wait_s=48.0, missing=16)
    assert decision.action is Action.KEEP
    assert decision.numbers["shadow_action"] == 1.0


def test_a_shadow_needs_what_its_policy_needs() -> None:
    """Lending without standalone GPUs has no meaning, in the shadow either."""
    run = RunConfig(train_batch_size=64, mini_batch_size=16, total_training_steps=5, hybrid_gpus=8, standalone_gpus=0)
    with pytest.raises(IncompatibleError):
        create("shadow:verl", configured(run, enable_switch=False))


def test_a_shadow_that_cannot_answer_changes_nothing() -> None:
    """Off acts without a depth; verl in the shadow cannot."""
    policy = create("shadow:verl", configured(enable_switch=False))
    policy.observe(LendDone(at=0, cost_s=1))
    policy.observe(StepBegan(at=1, step=1))
    decision = policy.decide(Point.STEP_BEGIN, 1.0)
    assert decision.action is Action.RECLAIM
    assert "shadow_action" not in decision.numbers


def test_a_simulated_run_goes_as_with_the_acting_policy() -> None:
    """Hearing jit must not change a second of verl's run."""
    workload = load("tiny-batch").model_copy(update={"steps": 10})
    alone = simulate(workload, "verl", 0).hours
    # Whoever is asked more often adds the same times up in other pieces.
    assert simulate(workload, "shadow:jit", 0).hours == pytest.approx(alone, rel=1e-12)


def test_names() -> None:
    """Reports and metrics carry it."""
    policy = create("shadow:jit", configured(RUN))
    assert policy.name == "shadow:jit"
    for event in (
        ReclaimDone(at=0, cost_s=1),
        StepEnded(at=1, step=1),
        DepthObserved(at=1, step=2, sampleable=0, in_flight=1, unpaid_credits=0),
    ):
        policy.observe(event)
