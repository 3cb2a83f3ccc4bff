"""The decision at a step's end."""

from dataclasses import dataclass

import pytest

from services.scheduler.policies import EventOrderError
from services.scheduler.policies.gain import benefit_seconds, pays, scaling_factor
from services.scheduler.policies.types import Action, Point, RunConfig, RunOpened
from tests.scheduler.policies.drive import Drive, configured


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the decision table. The defaults pay: 26 missing groups x 3 s x 1/2 = 39 s against 15 s.

    Rows that waited did so 48 s for 16 groups: a missing group costs 3 s; the threshold is 26 of 64 groups.
    """

    step: int = 5
    total: int = 10
    sampleable: int = 0
    lend_cost: float | None = 10.0
    reclaim_cost: float | None = 5.0
    waited: bool = True
    hybrid_gpus: int = 8
    batch: int = 64
    action: Action
    reason: str

    def drive(self) -> Drive:
        run = RunConfig(
            train_batch_size=self.batch,
            mini_batch_size=16,
            total_training_steps=self.total,
            hybrid_gpus=self.hybrid_gpus,
            standalone_gpus=8,
        )
        return Drive("verl", configured(run, adaptive_switch_threshold=False))


TABLE = {
    "pays": Row(action=Action.LEND, reason="26 groups are missing: lending saves 39.0 s and costs 15.0 s."),
    "last-step": Row(step=10, action=Action.KEEP, reason="Step 10 is the last, so nothing is lent."),
    "beyond-the-last-step": Row(step=11, action=Action.KEEP, reason="Step 11 is the last, so nothing is lent."),
    "last-step-but-one": Row(step=9, action=Action.LEND, reason="26 groups are missing: lending saves 39.0 s and"),
    "target-met": Row(sampleable=26, action=Action.KEEP, reason="26 groups are sampleable, enough for the threshold"),
    "more-than-met": Row(sampleable=99, action=Action.KEEP, reason="99 groups are sampleable, enough for the"),
    "benefit-just-below-cost": Row(
        sampleable=16, lend_cost=10.001, action=Action.KEEP, reason="10 groups are missing: lending would save 15.0 s"
    ),
    "benefit-equals-cost": Row(
        sampleable=16, action=Action.KEEP, reason="10 groups are missing: lending would save 15.0 s, not more than the"
    ),
    "benefit-just-above-cost": Row(
        sampleable=16, lend_cost=9.999, action=Action.LEND, reason="10 groups are missing: lending saves 15.0 s"
    ),
    "no-lend-cost": Row(
        lend_cost=None, reclaim_cost=1e6, action=Action.LEND, reason="26 groups are missing and the cost of a round"
    ),
    "no-reclaim-cost": Row(
        lend_cost=1e6, reclaim_cost=None, action=Action.LEND, reason="26 groups are missing and the cost of a round"
    ),
    "no-wait-history": Row(
        waited=False, lend_cost=1e6, action=Action.LEND, reason="26 groups are missing and no wait was measured yet"
    ),
    "no-history-on-the-last-step": Row(
        step=10, waited=False, lend_cost=None, action=Action.KEEP, reason="Step 10 is the last, so nothing is lent."
    ),
    "no-extra-gpus": Row(
        hybrid_gpus=0, lend_cost=0, reclaim_cost=0, action=Action.KEEP, reason="26 groups are missing: lending would"
    ),
    "no-extra-gpus-at-unknown-cost": Row(
        hybrid_gpus=0, lend_cost=None, action=Action.LEND, reason="26 groups are missing and the cost of a round"
    ),
    "huge-remaining": Row(
        batch=2**30, lend_cost=1e6, action=Action.LEND, reason="429496730 groups are missing: lending saves"
    ),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_h42_lend_decision(row: Row) -> None:
    """Lending on the last step, for nothing or at a loss wastes GPUs; not trying at all never learns the cost."""
    drive = row.drive()
    if row.lend_cost is not None:
        drive.lend_done(row.lend_cost)
    if row.reclaim_cost is not None:
        drive.reclaim_done(row.reclaim_cost)
    decision = drive.step(
        row.step, wait_s=48.0 if row.waited else 0.0, missing=16 if row.waited else 0, sampleable=row.sampleable
    )
    assert decision.action is row.action
    assert decision.reason.startswith(row.reason)
    numbers = decision.numbers
    assert numbers["should_switch_to_rollout"] == float(row.action is Action.LEND)
    assert numbers["step"] == row.step
    assert numbers["total_training_steps"] == row.total
    assert numbers["sampleable_count"] == row.sampleable
    assert numbers["remaining"] == max(0, round(0.4 * row.batch) - row.sampleable)
    assert numbers["scaling_factor"] == (row.hybrid_gpus + 8) / 8
    assert ("benefit_seconds" in numbers) == ("per_sample_time_seconds" in numbers) == row.waited
    known = row.lend_cost is not None and row.reclaim_cost is not None
    assert ("effective_switch_cost_seconds" in numbers) == known


def test_h42_reply_carries_the_numbers_used() -> None:
    """A decision that cannot be recomputed cannot be disputed."""
    drive = Drive("verl", configured(adaptive_switch_threshold=False))
    drive.lend_done(15)
    drive.reclaim_done(5)
    numbers = drive.step(5, wait_s=48.0, missing=16, sampleable=6).numbers
    assert numbers["remaining"] == numbers["threshold"] - numbers["sampleable_count"] == 20
    assert numbers["per_sample_time_seconds"] == 3.0
    assert numbers["benefit_seconds"] == pytest.approx(20 * 3 * (1 - 1 / 3))
    assert numbers["effective_switch_cost_seconds"] == 20


def test_remaining_rests_on_the_threshold_after_adapting_and_the_metric_on_the_ratio_before() -> None:
    """Mixing the two up shifts every decision by one step."""
    drive = Drive("verl", configured(switch_threshold_ratio=0.5))
    for step in (1, 2):
        decision = drive.step(step, wait_s=60.0, missing=16)
    assert decision.numbers["threshold_ratio"] == 0.5
    assert decision.threshold == decision.numbers["threshold"] == round(0.55 * 64) == 35
    assert decision.numbers["remaining"] == 35


@pytest.mark.parametrize(("cost", "wait_s"), [(5.0, 26.0), (1000.0, 78.0)])
def test_predicted_wait_is_that_of_the_answer(cost: float, wait_s: float) -> None:
    """26 groups at 3 s each: 78 s without the hybrids, a third of it with three times the GPUs."""
    drive = Drive("verl", configured(adaptive_switch_threshold=False))
    drive.lend_done(cost)
    drive.reclaim_done(cost)
    assert drive.step(5, wait_s=48.0, missing=16).predicted_wait_s == pytest.approx(wait_s)


def test_predicted_wait_is_unknown_without_history() -> None:
    """Zero would promise that nobody waits."""
    assert Drive("verl", configured()).step(5).predicted_wait_s is None


@pytest.mark.parametrize(
    ("step", "sampleable", "action"),
    [(5, 25, Action.LEND), (5, 26, Action.KEEP), (10, 0, Action.KEEP), (9, 0, Action.LEND)],
)
def test_fixed_lends_for_every_missing_group_but_never_at_the_end(step: int, sampleable: int, action: Action) -> None:
    """`fixed` has no cost test and no adaptation: neither a terrible cost nor idle steps change it."""
    run = RunConfig(train_batch_size=64, mini_batch_size=16, total_training_steps=10, hybrid_gpus=8, standalone_gpus=8)
    drive = Drive("fixed", configured(run))
    drive.lend_done(1e6)
    drive.reclaim_done(1e6)
    for before in range(1, step):
        drive.step(before, wait_s=60.0, missing=1)
    decision = drive.step(step, wait_s=60.0, missing=1, sampleable=sampleable)
    assert decision.action is action
    assert decision.threshold == 26
    assert decision.numbers["should_switch_to_rollout"] == float(action is Action.LEND)


def test_reconfigured_total_steps_count_from_the_next_decision() -> None:
    """A run that was extended while it ran must not stop lending at its old end."""
    drive = Drive("fixed", configured())
    assert drive.step(150).action is Action.KEEP
    longer = RunConfig(
        train_batch_size=64, mini_batch_size=16, total_training_steps=151, hybrid_gpus=8, standalone_gpus=8
    )
    drive.feed(RunOpened(at=drive.now, config=configured(longer)))
    assert drive.decide(Point.STEP_END).action is Action.LEND


@pytest.mark.parametrize("name", ["fixed", "verl"])
def test_step_end_needs_an_ended_step_and_the_depth_of_the_next(name: str) -> None:
    """Counting the depth for the ended step counts groups that the next step will evict."""
    drive = Drive(name, configured())
    with pytest.raises(EventOrderError, match="no step has ended"):
        drive.decide(Point.STEP_END)
    drive.step(1)
    drive.depth(1, 50)
    with pytest.raises(EventOrderError, match="depth of step 2"):
        drive.decide(Point.STEP_END)
    drive.begin(2)
    with pytest.raises(EventOrderError, match="no step has ended"):
        drive.decide(Point.STEP_END)


def test_gain_formulas() -> None:
    """The three formulas alone, at values a reader can check by hand."""
    assert scaling_factor(16, 8) == 3
    assert scaling_factor(0, 8) == 1
    assert benefit_seconds(10, 3, 1) == 0
    assert benefit_seconds(10, 3, 3) == pytest.approx(20)
    assert [pays(None, 1), pays(1, None), pays(None, None), pays(1, 1), pays(2, 1), pays(1, 2)] == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]
