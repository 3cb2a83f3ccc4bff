"""Lends, lease, holdings, timings, resume and log."""

import gc

import pytest

from services.runtime.errors import Code, TurnoutError
from services.runtime.history import BLOCK_WEIGHT, FRESH_WEIGHT
from services.scheduler.domain.events import LendKind, RequestProgress, RunEvent, RunningRequest, StepBegan
from services.scheduler.domain.holdings import Gpu, Holdings
from services.scheduler.domain.lease import TrainerLease
from services.scheduler.domain.lends import CLOSED_KEPT, Lend, Lends, lend_closed
from services.scheduler.domain.log import EventLog
from services.scheduler.domain.resume import Resume, check_resume
from services.scheduler.domain.timings import StepTimings
from services.scheduler.packing import PACKING

A, B = Gpu("n0", "a"), Gpu("n0", "b")


def test_a_lend_is_open_then_closed_for_good() -> None:
    """A lend closed twice would count twice, and one reopened would lend GPUs nobody decided to lend."""
    lends = Lends()
    lend = Lend("x", LendKind.STEP_END, 3)
    lends.begin(lend)
    assert lends.get("x") is lend
    lends.complete(4.5)
    assert lends.get("x") is None
    assert lends.cost_of("x") == 4.5
    with pytest.raises(AssertionError, match="cannot begin"):
        lends.begin(lend)
    with pytest.raises(AssertionError, match="no lend"):
        lends.abandon()


def test_an_unknown_lend_is_told_apart_from_a_closed_one() -> None:
    """ "Closed" for a lend of another run would make the trainer believe that its own is done."""
    lends = Lends()
    with pytest.raises(TurnoutError) as caught:
        lends.get("x")
    assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "LEND_UNKNOWN")
    lends.begin(Lend("x", LendKind.INIT, 0))
    lends.abandon()
    assert lends.cost_of("x") is None
    error = lend_closed("x", "abandoned")
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "LEND_CLOSED")


def test_validation_is_not_counted_and_the_start_costs_nothing() -> None:
    """A cold start or a validation in the cost window would keep verl's policy from lending for many steps."""
    lends = Lends()
    for number, kind in enumerate(LendKind):
        lends.begin(Lend(str(number), kind, 0))
        lends.complete(1.0)
    assert lends.completed == 3
    assert [Lend("", kind, 0).counted for kind in LendKind] == [False, True, True, False]
    assert [Lend("", kind, 0).update_standalone for kind in LendKind] == [True, True, False, False]


def test_the_lease_runs_out_unless_renewed_and_never_while_a_call_is_parked() -> None:
    """A trainer that waits an hour in PrepareStep lives; one that is silent for a minute may be succeeded."""
    lease = TrainerLease(60.0, now=100.0)
    assert lease.left_s(130.0) == 30.0
    lease.renew(130.0)
    assert lease.left_s(180.0) == 10.0
    assert lease.left_s(191.0) == 0.0
    lease.park()
    assert lease.left_s(5000.0) == 60.0
    lease.unpark(5000.0)
    assert lease.left_s(5059.0) == 1.0


def test_a_gpu_is_held_by_one_run_and_a_refused_claim_takes_nothing() -> None:
    """Two runs that lend the same GPU would each wake an engine in the other's training memory."""
    holdings = Holdings()
    holdings.claim("one", [A])
    with pytest.raises(TurnoutError) as caught:
        holdings.claim("two", [B, A])
    assert caught.value.reason == "GPU_HELD"
    assert caught.value.metadata["held_by"] == "one"
    assert caught.value.metadata["gpu_uuid"] == "a"
    assert holdings.of("two") == frozenset()
    holdings.claim("one", [B])
    assert holdings.of("one") == frozenset({B})
    holdings.claim("two", [A])
    holdings.release("two")
    assert holdings.of("two") == frozenset()


def test_the_same_uuid_on_another_node_is_another_gpu() -> None:
    """Virtual machines repeat device ids; two nodes must not shut each other out."""
    holdings = Holdings()
    holdings.claim("one", [Gpu("n0", "a")])
    holdings.claim("two", [Gpu("n1", "a")])


def test_timings_add_up_within_a_step_and_start_anew_with_the_next() -> None:
    """A wait in two slices is one wait; last step's reclaim is not this step's."""
    timings = StepTimings()
    assert timings.metrics() == {"timing_s/switch_wait": 0.0}
    timings.waited(2.0)
    timings.waited(3.0)
    timings.reclaimed(1.0)
    timings.reclaimed(0.5)
    assert timings.metrics() == {"timing_s/switch_wait": 5.0, "timing_s/switch_to_trainer": 1.5}
    timings.begin_step()
    assert timings.metrics() == {"timing_s/switch_wait": 0.0}


@pytest.mark.parametrize(
    ("resume", "scheduler", "buffer", "step"),
    [
        (None, None, 0, 0),
        (None, 0, 0, 0),
        (Resume(5), None, 5, 5),
        (Resume(5), 5, 5, 5),
        (Resume(5, keep_live=True), 9, 9, 5),
        (Resume(5, checkpoint_id="c"), 9, 9, 5),
    ],
)
def test_a_trainer_goes_on_where_all_agree_or_it_says_what_holds(
    resume: Resume | None, scheduler: int | None, buffer: int, step: int
) -> None:
    """A resume that is refused without need stops a job; the table of the design is what it may rely on."""
    assert check_resume(resume, scheduler, buffer) == step


@pytest.mark.parametrize(
    ("resume", "scheduler", "buffer"),
    [(None, 3, 0), (None, None, 3), (Resume(5), 6, 5), (Resume(5), 5, 6), (Resume(5), None, 0)],
)
def test_a_mismatch_names_both_steps(resume: Resume | None, scheduler: int | None, buffer: int) -> None:
    """A trainer that restarts at another step than its data would train on groups of the wrong age."""
    with pytest.raises(TurnoutError) as caught:
        check_resume(resume, scheduler, buffer)
    assert caught.value.reason == "RESUME_MISMATCH"
    assert caught.value.metadata["buffer_step"] == str(buffer)
    assert caught.value.metadata["scheduler_step"] == ("unknown" if scheduler is None else str(scheduler))


def test_a_resume_after_the_last_step_there_can_be_is_refused_before_anybody_is_fenced() -> None:
    """Its next step fits into no answer: the run was opened, its predecessor fenced, and the call ended INTERNAL."""
    with pytest.raises(TurnoutError) as caught:
        check_resume(Resume(2**63 - 1, keep_live=True), None, 0)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.metadata["field"] == "resume.resume_step"


def test_the_lends_that_are_over_do_not_pile_up() -> None:
    """A run lends in every step; kept for ever, each start would read them all back."""
    lends = Lends()
    for number in range(CLOSED_KEPT + 10):
        lends.begin(Lend(str(number), LendKind.STEP_END, number))
        lends.complete(1.0)
    assert len(lends.closed()) == CLOSED_KEPT
    assert lends.cost_of(str(CLOSED_KEPT + 9)) == 1.0
    with pytest.raises(TurnoutError) as caught:
        lends.require("9")
    assert caught.value.reason == "LEND_UNKNOWN"


def test_the_log_has_no_gaps_and_time_does_not_run_backwards() -> None:
    """A consumer that resumes by number would miss or repeat events."""
    log = EventLog(100, PACKING)
    assert (log.first, log.last) == (1, 0)
    log.append(StepBegan(1), 5.0, 0.0)
    log.append(StepBegan(2), 4.0, 0.0)
    assert [(event.sequence, event.at) for event in log.read(1, 10)] == [(1, 5.0), (2, 5.0)]
    assert log.read(3, 10) == []
    assert [event.sequence for event in log.read(1, 1)] == [1]


def test_trimmed_events_are_an_error_never_a_gap() -> None:
    """A silent gap would make a report add up to the wrong sum."""
    log = EventLog(8, PACKING)
    for step in range(30):
        log.append(StepBegan(step), float(step), 0.0)
    assert log.last == 30
    assert 8 <= log.last - log.first + 1 <= 10
    assert log.read(log.first, 100)[-1].sequence == 30
    with pytest.raises(TurnoutError) as caught:
        log.read(log.first - 1, 1)
    assert (caught.value.code, caught.value.reason) == (Code.OUT_OF_RANGE, "EVENTS_TRIMMED")
    assert caught.value.metadata["first"] == str(log.first)


def test_old_events_are_packed_and_told_as_they_were() -> None:
    """As objects a hundred thousand events take fifty megabytes, and readings of many requests a gigabyte."""
    before = _objects(RunEvent)
    log = EventLog(100_000, PACKING)
    requests = tuple(RunningRequest(f"g{n}", n % 8, n, "standalone-0", on_hybrid=False) for n in range(300))
    for number in range(6000):
        reading = number % 100 == 0
        log.append(RequestProgress(requests, 1.0) if reading else StepBegan(number), float(number), 1e9 + number)
    told = log.read(1, 6000)
    assert told == list(log)
    assert [event.sequence for event in told] == list(range(1, 6001))
    assert (told[100].event, told[100].at, told[100].time) == (RequestProgress(requests, 1.0), 100.0, 1e9 + 100)
    assert (told[99].event, told[99].at) == (StepBegan(99), 99.0)
    del told
    assert _objects(RunEvent) - before < FRESH_WEIGHT + 2 * BLOCK_WEIGHT


def _objects(kind: type) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


def test_numbers_of_another_life_are_an_error_never_a_silence() -> None:
    """A consumer that went on after a restart of the service heard nothing until the new run was as long as the old."""
    log = EventLog(100, PACKING)
    log.append(StepBegan(1), 0.0, 0.0)
    assert log.read(2, 1) == []
    with pytest.raises(TurnoutError) as caught:
        log.read(3, 1)
    assert (caught.value.code, caught.value.reason) == (Code.OUT_OF_RANGE, "EVENTS_AHEAD")
    assert caught.value.metadata["next_sequence"] == "2"


def test_listeners_hear_of_every_event_until_they_stop() -> None:
    """A watcher that missed a wake-up would hang until the next event."""
    log = EventLog(10, PACKING)
    heard: list[int] = []
    stop = log.listen(lambda: heard.append(log.last))
    log.append(StepBegan(1), 0.0, 0.0)
    stop()
    log.append(StepBegan(2), 0.0, 0.0)
    assert heard == [1]
