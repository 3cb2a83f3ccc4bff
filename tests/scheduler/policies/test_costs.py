"""The cost windows."""

import math

import pytest

from services.scheduler.policies import FieldError, NotFiniteError, OutOfRangeError
from services.scheduler.policies.costs import CostWindow, SwitchCosts
from services.scheduler.policies.types import Point, RunOpened
from tests.scheduler.policies.drive import Drive, configured


def test_h45_cold_first_cost_leaves_the_window() -> None:
    """A cold start of 1000 s that stayed in the mean would forbid every later lend."""
    costs = SwitchCosts(3)
    costs.reclaim.add(5, at=0)
    means = []
    for at, cost in enumerate([1000, 2, 2, 2, 2]):
        costs.lend.add(cost, at=at)
        means.append(costs.round_trip())
    assert means == pytest.approx([1005, 506, 1004 / 3 + 5, 7, 7])


def test_h45_window_of_one_holds_the_last_cost() -> None:
    """The smallest window must not be read as "no window"."""
    window = CostWindow(1)
    for cost in (1000, 2):
        window.add(cost, at=0)
    assert window.mean() == 2


def test_h45_directions_are_kept_apart() -> None:
    """One shared window would let lends push reclaims out, and halve the cost of a round trip."""
    costs = SwitchCosts(3)
    for at in range(5):
        costs.lend.add(2, at=at)
    assert costs.round_trip() is None
    costs.reclaim.add(40, at=9)
    assert (costs.lend.mean(), costs.reclaim.mean(), costs.round_trip()) == (2, 40, 42)


def test_h45_old_costs_stay_and_show_their_age() -> None:
    """After 100 steps without a switch the last costs still count, and a reader sees how old they are."""
    drive = Drive("verl", configured())
    drive.lend_done(15)
    drive.reclaim_done(5)
    lent_at, reclaimed_at = 1.0, 2.0
    for step in range(1, 101):
        decision = drive.step(step, sampleable=64)
    assert decision.numbers["effective_switch_cost_seconds"] == 20
    assert decision.numbers["lend_cost_age_seconds"] == drive.now - lent_at
    assert decision.numbers["reclaim_cost_age_seconds"] == drive.now - reclaimed_at


def test_ages_and_means_are_absent_before_the_first_cost() -> None:
    """An age of 0 for a cost that was never measured would read as fresh."""
    window = CostWindow(3)
    assert window.mean() is None
    assert window.age(5.0) is None
    assert SwitchCosts(3).numbers(5.0) == {}


def test_costs_not_counted_stay_out_of_the_window() -> None:
    """Lends at the run's start and for validation are no round trips of training."""
    drive = Drive("verl", configured())
    drive.lend_done(1000, counted=False)
    drive.reclaim_done(1000, counted=False)
    assert "effective_switch_cost_seconds" not in drive.step(1).numbers
    drive.lend_done(15)
    drive.reclaim_done(5)
    assert drive.step(2).numbers["effective_switch_cost_seconds"] == 20


def test_reconfigured_window_keeps_the_newest_costs() -> None:
    """A smaller window that dropped everything would forget what the run paid to learn."""
    drive = Drive("verl", configured())
    for cost in (100, 10, 20):
        drive.lend_done(cost)
        drive.reclaim_done(0)
    drive.feed(RunOpened(at=drive.now, config=configured(switch_cost_window_size=2)))
    assert drive.step(1).numbers["effective_switch_cost_seconds"] == 15


@pytest.mark.parametrize(
    ("cost", "error"), [(-1, OutOfRangeError), (math.nan, NotFiniteError), (math.inf, NotFiniteError)]
)
def test_impossible_cost_is_refused_and_changes_nothing(cost: float, error: type[FieldError]) -> None:
    """One NaN in the window would make every later comparison false, so nothing would ever be lent again."""
    drive = Drive("verl", configured())
    drive.reclaim_done(5)
    for _ in range(2):
        with pytest.raises(error, match="cost_s"):
            drive.lend_done(cost)
    drive.begin(1)
    assert drive.decide(Point.STEP_BEGIN).reason == "The GPUs are with the trainer."
    assert "lend_cost_seconds" not in drive.end(1).numbers
