"""Where wait, missing groups and idle steps come from."""

import math

import pytest

from services.scheduler.policies import FieldError
from services.scheduler.policies.types import RunConfig
from services.scheduler.policies.waits import StepWaits, WaitMeter
from tests.scheduler.policies.drive import RUN, Drive, configured


def test_missing_and_wait_add_up_over_the_mini_batches_of_a_step() -> None:
    """Overwriting instead of adding would report the last mini-batch only."""
    drive = Drive("verl", configured())
    drive.begin(1)
    for mini_batch, (sampleable, wait_s) in enumerate([(10, 3.0), (16, 0.0), (40, 0.5), (0, 7.0)]):
        drive.sample(1, mini_batch, sampleable, wait_s)
    numbers = drive.end(1).numbers
    assert numbers["wait_samples"] == 6 + 16
    assert numbers["wait_seconds"] == 10.5
    assert numbers["per_sample_time_seconds"] == 10.5 / 22


def test_waits_start_at_zero_in_every_step() -> None:
    """A wait carried over would make a calm step idle."""
    drive = Drive("verl", configured())
    assert drive.step(1, wait_s=9.0, missing=4).numbers["wait_seconds"] == 9.0
    calm = drive.step(2).numbers
    assert (calm["wait_seconds"], calm["wait_samples"], calm["idle"]) == (0.0, 0.0, 0.0)


def test_waits_of_a_step_that_did_not_end_are_forgotten() -> None:
    """After a restart the trainer begins the step again, and its wait counts once."""
    drive = Drive("verl", configured())
    drive.begin(1)
    drive.sample(1, 0, 0, 100.0)
    numbers = drive.step(1, wait_s=8.0, missing=4).numbers
    assert (numbers["wait_seconds"], numbers["per_sample_time_seconds"]) == (8.0, 2.0)


def test_events_of_another_step_do_not_count() -> None:
    """A late EndSample of a former epoch must not lengthen the open step's wait."""
    drive = Drive("verl", configured())
    drive.begin(2)
    drive.sample(1, 0, 0, 100.0)
    numbers = drive.end(2).numbers
    assert (numbers["wait_seconds"], numbers["wait_samples"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("wait_s", "missing", "grows"),
    [
        pytest.param(8.0, 4, True, id="waited-and-missed"),
        pytest.param(8.0, 0, False, id="waited-only"),
        pytest.param(0.0, 4, False, id="missed-only"),
        pytest.param(0.0, 0, False, id="neither"),
    ],
)
def test_lifetime_grows_only_by_steps_that_waited_and_missed(wait_s: float, missing: int, grows: bool) -> None:
    """A wait without a missing group (a slow network) would inflate the time per group for ever."""
    meter = WaitMeter()
    meter.asked(16, 0)
    meter.waited(32.0)
    assert meter.end_step() == StepWaits(32.0, 16)
    meter.begin_step()
    meter.asked(16, 16 - missing)
    meter.waited(wait_s)
    meter.end_step()
    assert meter.seconds_per_group() == ((32 + wait_s) / (16 + missing) if grows else 2.0)


def test_time_per_group_is_unknown_before_the_first_wait() -> None:
    """Zero instead of unknown would mean "lending gains nothing" and forbid the first lend."""
    assert WaitMeter().seconds_per_group() is None


@pytest.mark.parametrize(("wait_s", "idle"), [(1.9, 0.0), (2.0, 0.0), (2.0001, 1.0)])
def test_step_is_idle_only_above_the_tolerance(wait_s: float, idle: float) -> None:
    """A wait equal to the tolerance is what a poll of that interval costs at worst."""
    assert Drive("verl", configured()).step(1, wait_s=wait_s, missing=1).numbers["idle"] == idle


def test_idle_tolerance_is_configured() -> None:
    """The tolerance scales with the run's clock."""
    run = RunConfig(train_batch_size=64, mini_batch_size=16, total_training_steps=9, hybrid_gpus=1, standalone_gpus=1)
    assert run.idle_tolerance_s == RUN.idle_tolerance_s == 2.0
    patient = RunConfig(
        train_batch_size=64,
        mini_batch_size=16,
        total_training_steps=9,
        hybrid_gpus=1,
        standalone_gpus=1,
        idle_tolerance_s=30.0,
    )
    assert Drive("verl", configured(patient)).step(1, wait_s=29.0, missing=1).numbers["idle"] == 0.0


@pytest.mark.parametrize("wait_s", [-0.1, math.nan, math.inf])
def test_impossible_wait_is_refused_and_changes_nothing(wait_s: float) -> None:
    """One NaN from a trainer would poison the lifetime wait."""
    drive = Drive("verl", configured())
    drive.begin(1)
    drive.ask(1, 0, 8)
    with pytest.raises(FieldError, match="wait_s"):
        drive.got(1, 0, wait_s)
    drive.got(1, 0, 4.0)
    assert drive.end(1).numbers["per_sample_time_seconds"] == 0.5
