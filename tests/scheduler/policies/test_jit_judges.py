"""Predicted against realised: the two judges of `jit`, and the trainer's rhythm."""

import pytest

from services.scheduler.policies.jit.guard import Guard
from services.scheduler.policies.jit.hindsight import Hindsight
from services.scheduler.policies.jit.rhythm import Rhythm
from services.scheduler.policies.types import LendDone, MiniBatchBegan, MiniBatchEnded, ReclaimDone, SyncDone


def step(guard: Guard, *, lent: bool, missed_s: float, train_s: float = 200.0, longer_s: float = 0.0) -> None:
    """A step predicted at 300 s without and 260 s with a lend. Lengths make the first `longer_s` longer; whichever came
    true took `missed_s` longer than that."""
    guard.predicted(0.0, 300.0, 260.0, train_s)
    if lent:
        guard.lent()
    guard.trained(train_s)
    guard.step_ended((260.0 if lent else 300.0 + longer_s) + missed_s, 300.0 + longer_s, 260.0)


def test_lends_that_cost_more_than_predicted_are_stopped() -> None:
    """A policy that believes in a gain of 40 s and loses 20 s each time has to notice."""
    guard = Guard()
    for _ in range(30):
        step(guard, lent=True, missed_s=60.0)
    assert 40 + guard.correction_s < 0


def test_waits_longer_than_predicted_speak_for_lending() -> None:
    """The other kind of error counts too."""
    guard = Guard()
    before = guard.correction_s
    for _ in range(30):
        step(guard, lent=False, missed_s=30.0)
    assert guard.correction_s > before + 20


def test_steps_that_were_not_lent_for_do_not_speak_for_lending_by_being_the_worst() -> None:
    """Only steps that seem to wait little are left alone, so their waits turn out longer than predicted on average.
    Learned from them alone, that error made lending look better and better where it lost time."""
    guard = Guard()
    for _ in range(20):
        step(guard, lent=False, missed_s=0.0, longer_s=20.0)
        step(guard, lent=True, missed_s=0.0, longer_s=-20.0)
    assert guard.correction_s == pytest.approx(0.0, abs=2.0)


def test_lengths_that_make_lending_worthless_are_learned_while_it_lends() -> None:
    """A policy that lent at every step never learned what not lending would have cost."""
    guard = Guard()
    for _ in range(40):
        step(guard, lent=True, missed_s=0.0, longer_s=-60.0)
    assert 40 + guard.correction_s < guard.margin_s


def test_one_bad_step_is_no_verdict() -> None:
    """Steps scatter by tens of seconds."""
    guard = Guard()
    step(guard, lent=True, missed_s=500.0)
    assert guard.correction_s > -20


def test_training_that_takes_longer_is_no_error_of_the_prediction() -> None:
    """What the trainer does with its GPUs is not what lending is judged by."""
    guard = Guard()
    guard.predicted(0.0, 300.0, 260.0, 200.0)
    guard.lent()
    guard.trained(290.0)
    guard.step_ended(350.0, 300.0, 260.0)
    assert guard.correction_s == pytest.approx(0.0)


def test_a_verdict_fades_when_it_is_not_confirmed() -> None:
    """Otherwise one bad phase would end lending for the rest of the run."""
    guard = Guard()
    for _ in range(10):
        step(guard, lent=True, missed_s=60.0)
    worst = guard.correction_s
    for _ in range(200):
        step(guard, lent=False, missed_s=0.0)
    assert guard.correction_s > worst / 2


def test_gains_within_the_usual_error_are_not_worth_the_risk() -> None:
    """Where predictions miss by as much as they promise, lending is a bet."""
    sure, unsure = Guard(), Guard()
    for number in range(20):
        step(sure, lent=True, missed_s=2.0 if number % 2 else -2.0)
        step(unsure, lent=True, missed_s=30.0 if number % 2 else -30.0)
    assert unsure.margin_s > sure.margin_s + 5


def test_a_step_that_was_not_predicted_teaches_nothing() -> None:
    """The first steps of a run."""
    guard = Guard()
    guard.step_ended(100.0, 300.0, 260.0)
    assert guard.correction_s == 0


def test_longer_waits_than_predicted_stretch_the_next_prediction_within_bounds() -> None:
    """Predictions at a reclaim are chosen at the moment they look best."""
    hindsight = Hindsight()
    first = hindsight.stretch
    hindsight.predicted(5.0, 200.0)
    hindsight.waited(30.0)
    hindsight.waited(20.0)
    hindsight.step_ended()
    assert hindsight.stretch > first
    for _ in range(200):
        hindsight.predicted(0.0, 200.0)
        hindsight.waited(1000.0)
        hindsight.step_ended()
    assert hindsight.stretch == pytest.approx(1.5)
    for _ in range(400):
        hindsight.predicted(100.0, 200.0)
        hindsight.step_ended()
    assert hindsight.stretch == pytest.approx(0.9)


def test_steps_without_a_reclaim_do_not_teach_hindsight() -> None:
    """There was no prediction to compare with."""
    hindsight = Hindsight()
    first = hindsight.stretch
    hindsight.waited(100.0)
    hindsight.step_ended()
    assert hindsight.stretch == first


def test_rhythm_learns_costs_and_paces() -> None:
    """The first lend is measured cold and only used until there is a real one."""
    rhythm = Rhythm(3)
    rhythm.observe(LendDone(at=0, cost_s=100.0, counted=False))
    assert rhythm.lend_s == 100.0
    rhythm.observe(LendDone(at=1, cost_s=12.0))
    rhythm.observe(ReclaimDone(at=2, cost_s=4.0))
    rhythm.observe(SyncDone(at=3, cost_s=20.0))
    rhythm.observe(SyncDone(at=4, cost_s=10.0))
    assert (rhythm.lend_s, rhythm.reclaim_s) == (12.0, 4.0)
    assert rhythm.sync_s == pytest.approx(17.0)
    rhythm.observe(MiniBatchBegan(at=10, step=1, mini_batch=0))
    rhythm.observe(MiniBatchEnded(at=70, step=1, mini_batch=0))
    rhythm.observe(MiniBatchBegan(at=70, step=1, mini_batch=1))
    rhythm.observe(MiniBatchEnded(at=110, step=1, mini_batch=1))
    assert rhythm.mini_batch_s == pytest.approx(0.7 * 60 + 0.3 * 40)
