"""The names decisions are logged under."""

import pytest

from services.scheduler.policies import decision_metrics
from services.scheduler.policies.types import Point
from tests.scheduler.policies.drive import Drive, configured

ALWAYS = {
    "separate_async/switch/threshold_ratio",
    "separate_async/switch/wait_samples",
    "separate_async/switch/idle",
    "separate_async/decision/sampleable_count",
    "separate_async/decision/remaining",
    "separate_async/decision/should_switch_to_rollout",
}
WAIT_KNOWN = {"separate_async/decision/per_sample_time_seconds", "separate_async/decision/benefit_seconds"}
COST_KNOWN = {"separate_async/decision/effective_switch_cost_seconds"}


def test_metrics_appear_once_they_are_known() -> None:
    """A zero for "not measured yet" would be averaged into a dashboard."""
    drive = Drive("verl", configured())
    assert set(decision_metrics(drive.step(1))) == ALWAYS
    assert set(decision_metrics(drive.step(2, wait_s=5.0, missing=2))) == ALWAYS | WAIT_KNOWN
    drive.lend_done()
    drive.reclaim_done()
    assert set(decision_metrics(drive.step(3))) == ALWAYS | WAIT_KNOWN | COST_KNOWN


def test_metrics_carry_the_values_of_the_decision() -> None:
    """verl's names with verl's meanings: the ratio is the one before this step moved it."""
    drive = Drive("verl", configured(switch_threshold_ratio=0.5))
    drive.lend_done(15)
    drive.reclaim_done(5)
    drive.step(1, wait_s=48.0, missing=16)
    assert decision_metrics(drive.step(2, wait_s=48.0, missing=16, sampleable=5)) == pytest.approx(
        {
            "separate_async/switch/threshold_ratio": 0.5,
            "separate_async/switch/wait_samples": 16.0,
            "separate_async/switch/idle": 1.0,
            "separate_async/decision/sampleable_count": 5.0,
            "separate_async/decision/remaining": 30.0,
            "separate_async/decision/should_switch_to_rollout": 1.0,
            "separate_async/decision/per_sample_time_seconds": 3.0,
            "separate_async/decision/benefit_seconds": 60.0,
            "separate_async/decision/effective_switch_cost_seconds": 20.0,
        }
    )


def test_fixed_reports_what_it_knows() -> None:
    """`fixed` weighs no cost, so it has none to report."""
    drive = Drive("fixed", configured())
    drive.lend_done()
    drive.reclaim_done()
    assert set(decision_metrics(drive.step(1, wait_s=5.0, missing=2))) == ALWAYS


def test_decisions_within_a_step_and_with_switching_off_have_no_metrics() -> None:
    """verl logs a decision at a step's end, and none while switching is off."""
    drive = Drive("verl", configured())
    drive.lend_done()
    drive.begin(1)
    drive.depth(1, 3)
    assert decision_metrics(drive.decide(Point.WAITING)) == {}
    assert decision_metrics(drive.decide(Point.SAMPLE_BEGIN)) == {}
    assert decision_metrics(Drive("verl", configured(enable_switch=False)).step(1)) == {}
