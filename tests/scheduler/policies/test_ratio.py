"""The adaptive ratio, seen through the decisions of whole steps and directly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policies.ratio import AdaptiveRatio
from services.scheduler.policies.types import Point, RunOpened
from tests.scheduler.policies.drive import Drive, configured

IDLE, CALM = True, False


def ratios(ratio: AdaptiveRatio, steps: list[bool]) -> list[float]:
    """The ratio after each step."""
    values = []
    for idle in steps:
        ratio.step_ended(idle)
        values.append(ratio.value)
    return values


def test_h41_ratio_steps_up_once_per_idle_step_and_down_once_per_calm_step() -> None:
    """A step up applied twice keeps GPUs lent longer than configured."""
    ratio = AdaptiveRatio(configured(switch_threshold_ratio=0.5))
    assert ratios(ratio, [IDLE] * 4) == pytest.approx([0.50, 0.55, 0.60, 0.65], abs=1e-9)
    assert ratios(ratio, [CALM] * 4) == pytest.approx([0.65, 0.62, 0.59, 0.56], abs=1e-9)


def test_h41_alternating_steps_move_nothing() -> None:
    """Counters that are not cleared by the other kind would drift on noise."""
    ratio = AdaptiveRatio(configured(switch_threshold_ratio=0.5))
    assert ratios(ratio, [IDLE, CALM] * 10) == [0.5] * 20


def test_h41_long_idle_ends_at_exactly_one() -> None:
    """A ratio of 1.0000000002 would be refused wherever the range (0, 1] is checked."""
    ratio = AdaptiveRatio(configured(switch_threshold_ratio=0.5))
    assert ratios(ratio, [IDLE] * 30)[-1] == 1.0


def test_h41_long_calm_ends_at_exactly_one_mini_batch_share() -> None:
    """Below one mini-batch the trainer could not start although GPUs came back."""
    ratio = AdaptiveRatio(configured(switch_threshold_ratio=0.5))
    assert ratios(ratio, [CALM] * 30)[-1] == 0.25


def test_h41_repeated_question_and_repeated_step_end_move_the_ratio_once() -> None:
    """A retried EndStep that adapts again is how an upward step came to be applied twice."""
    once = Drive("verl", configured(switch_threshold_ratio=0.5))
    twice = Drive("verl", configured(switch_threshold_ratio=0.5))
    for step in range(1, 6):
        expected = once.step(step, wait_s=60.0, missing=16)
        first = twice.step(step, wait_s=60.0, missing=16)
        assert twice.end(step).numbers["threshold_ratio"] == first.numbers["threshold_ratio"]
        assert twice.decide(Point.STEP_END).threshold == first.threshold == expected.threshold


@pytest.mark.parametrize("release", [1, 2, 3])
def test_release_steps_delay_the_first_move_only(release: int) -> None:
    """A counter that restarted after each move would make the ratio move every `release` steps."""
    ratio = AdaptiveRatio(configured(switch_threshold_ratio=0.5, switch_threshold_release_steps=release))
    moved = [value > 0.5 for value in ratios(ratio, [IDLE] * 5)]
    assert moved == [step >= release for step in range(1, 6)]
    assert ratio.value == pytest.approx(0.5 + 0.05 * (6 - release), abs=1e-9)


def test_ratio_stays_when_not_adaptive() -> None:
    """A switch that is accepted and ignored is worse than none."""
    ratio = AdaptiveRatio(configured(switch_threshold_ratio=0.5, adaptive_switch_threshold=False))
    assert ratios(ratio, [IDLE] * 5 + [CALM] * 5) == [0.5] * 10


def test_reopening_keeps_the_learned_ratio_unless_the_configured_one_changed() -> None:
    """A trainer that comes back would otherwise learn its ratio from the start."""
    drive = Drive("verl", configured(switch_threshold_ratio=0.5))
    for step in range(1, 4):
        drive.step(step, wait_s=60.0, missing=16)
    drive.feed(RunOpened(at=drive.now, config=configured(switch_threshold_ratio=0.5)))
    assert drive.step(4).numbers["threshold_ratio"] == pytest.approx(0.60)
    drive.feed(RunOpened(at=drive.now, config=configured(switch_threshold_ratio=0.8)))
    assert drive.step(5).numbers["threshold_ratio"] == 0.8


@given(steps=st.lists(st.booleans(), max_size=200), start=st.floats(0.25, 1))
def test_ratio_stays_between_one_mini_batch_share_and_one(steps: list[bool], start: float) -> None:
    """Drift of the float sums must not leave the range."""
    assert all(0.25 <= value <= 1 for value in ratios(AdaptiveRatio(configured(switch_threshold_ratio=start)), steps))
