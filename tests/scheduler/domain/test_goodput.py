"""What a lend brought, and what steps were predicted to wait."""

from services.scheduler.domain import events, group_events
from services.scheduler.domain.events import DecisionAction, DecisionPoint, LendKind, Mode, RouteState
from services.scheduler.domain.foresight import Foresight
from services.scheduler.domain.goodput import GoodputMeter

Timed = tuple[float, events.Happening]


def told(*happened: Timed) -> list[events.LendGoodput]:
    """What the meter tells."""
    meter = GoodputMeter()
    return [brought for at, event in happened if (brought := meter.read(event, at)) is not None]


def counters(hybrid: int, standalone: int, colocated: int = 0) -> events.ReplicaCounters:
    """Tokens decoded so far."""

    def reading(name: str, pool: bool | None, decoded: int) -> events.ReplicaReading:
        return events.ReplicaReading(name, pool, decoded, 0, 0.0, 1, RouteState.SERVING)

    return events.ReplicaCounters(
        (reading("h", True, hybrid), reading("s", False, standalone), reading("c", None, colocated))
    )


def lend(point: DecisionPoint = DecisionPoint.STEP_END, alone_s: float | None = 100.0) -> events.DecisionMade:
    """A decision to lend."""
    numbers = {} if alone_s is None else {"wait_alone_seconds": alone_s}
    return events.DecisionMade(point, 1, DecisionAction.LEND, "jit", "r", numbers)


def a_lend(alone_s: float | None = 100.0) -> list[Timed]:
    """Decided at 10 s, 15 s of switching there and 5 s back; the trainer waits 30 s with it and 7 s after it."""
    return [
        (9.0, counters(1000, 5000)),
        (10.0, events.StepEnded(1)),
        (10.0, lend(alone_s=alone_s)),
        (25.0, events.LendDone("l", LendKind.STEP_END, 15.0, True)),
        (26.0, events.StepBegan(2)),
        (40.0, group_events.TrajectoryFinished("g", 0, 700, "h", True)),
        (41.0, group_events.TrajectoryFinished("g", 1, 900, "s", False)),
        (49.0, counters(7000, 7000, 9999)),
        (51.0, events.ModeChanged(Mode.ROLLOUT, Mode.RECLAIMING, "")),
        (56.0, events.ReclaimDone(5.0, True)),
        (57.0, group_events.TrajectoryFinished("g", 2, 800, "h", True)),
        (59.0, counters(7600, 9000)),
        (63.0, events.MiniBatchEnded(2, 0, 7.0)),
        (90.0, events.StepEnded(2)),
    ]


def test_a_lend_is_told_with_what_it_decoded_delivered_cost_and_gained() -> None:
    """Without it nobody can tell a lend that paid from one that cost."""
    (brought,) = told(*a_lend())
    assert brought == events.LendGoodput(
        lend_id="l",
        decoded_tokens=6600,
        delivered_tokens=700,
        switch_seconds=20.0,
        # 15 s to lend, 30 s of the step until the GPUs were back, 7 s for the first mini-batch.
        lost_seconds=52.0,
        # Standalone alone: 2000 tokens in the 40 s from the reading before the lend to the last within it.
        saved_at_most_seconds=6600 * 40 / 2000 - 20.0,
        predicted_alone_seconds=100.0,
        gained_seconds=48.0,
    )


def test_what_the_controller_counted_as_kept_goes_before_what_ended_there() -> None:
    """A request that was interrupted keeps its tokens and ends elsewhere: they were not wasted."""

    def reading(decoded: int, kept: int | None) -> events.ReplicaCounters:
        return events.ReplicaCounters((events.ReplicaReading("h", True, decoded, 0, 0.0, 1, RouteState.SERVING, kept),))

    happened = [
        (at, {9.0: reading(0, None), 49.0: reading(7000, 6000), 59.0: reading(7600, 7500)}.get(at, event))
        for at, event in a_lend()
    ]
    (brought,) = told(*happened)
    assert (brought.decoded_tokens, brought.delivered_tokens) == (7600, 7500)


def test_a_lend_that_cost_more_than_it_saved_says_so() -> None:
    """A lend that is only ever praised is never given up."""
    (brought,) = told(*a_lend(alone_s=40.0))
    assert brought.gained_seconds == -12.0


def test_without_a_prediction_nothing_is_said_to_be_gained() -> None:
    """verl predicts no wait; 0 would read as a wait of nothing."""
    (brought,) = told(*a_lend(alone_s=None))
    assert (brought.predicted_alone_seconds, brought.gained_seconds) == (None, None)
    assert brought.lost_seconds == 52.0


def test_what_is_told_is_the_same_after_a_restart_at_any_point() -> None:
    """A restart in the middle of a lend would otherwise lose its tokens, or tell them twice."""
    whole, happened = told(*a_lend()), a_lend()
    for cut in range(len(happened) + 1):
        meter = GoodputMeter()
        meter.replay(events.RunEvent(n + 1, at, 0.0, event) for n, (at, event) in enumerate(happened[:cut]))
        rest = [meter.read(event, at) for at, event in happened[cut:]]
        assert [brought for brought in rest if brought is not None] == (whole if cut < len(happened) else [])


def test_the_wait_of_a_lend_within_a_step_is_counted_once() -> None:
    """The trainer's own measure of the wait covers the lend and the reclaim in it."""
    (brought,) = told(
        (1.0, events.StepBegan(1)),
        (2.0, lend(DecisionPoint.SAMPLE_BEGIN, 60.0)),
        (12.0, events.LendDone("l", LendKind.WITHIN_STEP, 10.0, True)),
        (30.0, events.ReclaimDone(3.0, True)),
        (31.0, events.MiniBatchEnded(1, 0, 29.0)),
        (32.0, events.MiniBatchEnded(1, 1, 1.0)),
        (40.0, events.StepEnded(1)),
    )
    assert (brought.lost_seconds, brought.gained_seconds, brought.switch_seconds) == (30.0, 30.0, 13.0)


def test_lends_of_the_start_and_of_validation_are_measured_against_no_prediction() -> None:
    """Nobody decided them for what they would gain."""
    (brought,) = told(
        (1.0, lend()),
        (2.0, events.LendDone("v", LendKind.VALIDATION, 1.0, False)),
        (3.0, events.ReclaimDone(1.0, True)),
        (4.0, events.StepEnded(1)),
    )
    assert brought.gained_seconds is None


def test_a_replica_that_restarted_counts_from_zero_again() -> None:
    """A negative number of tokens would cancel what others decoded."""
    first, last = a_lend()[:7], a_lend()[8:11] + a_lend()[12:]
    (brought,) = told(*first, (45.0, counters(7000, 7000)), (47.0, counters(400, 7100)), *last)
    assert brought.decoded_tokens == 6400


def waits(*happened: events.Happening) -> list[tuple[float, float]]:
    """Predicted and realised waits."""
    foresight = Foresight()
    return [both for event in happened if (both := foresight.read(event)) is not None]


def made(point: DecisionPoint, action: DecisionAction, wait_s: float | None) -> events.DecisionMade:
    return events.DecisionMade(point, 1, action, "jit", "r", predicted_wait_seconds=wait_s)


def test_predictions_are_held_against_the_waits_of_their_step() -> None:
    """A prediction that nobody checks gets no better."""
    keep, reclaim, end = DecisionAction.KEEP, DecisionAction.RECLAIM, DecisionPoint.STEP_END
    assert waits(
        made(end, keep, 12.0),
        events.StepBegan(2),
        events.MiniBatchEnded(2, 0, 4.0),
        events.MiniBatchEnded(2, 1, 5.0),
        events.StepEnded(2),
        made(end, DecisionAction.LEND, 3.0),
        events.StepBegan(3),
        made(DecisionPoint.WAITING, keep, 99.0),
        made(DecisionPoint.WAITING, reclaim, 2.5),
        events.MiniBatchEnded(3, 0, 1.0),
        events.StepEnded(3),
        made(end, keep, None),
        events.StepBegan(4),
        events.MiniBatchEnded(4, 0, 1.0),
        events.StepEnded(4),
    ) == [(12.0, 9.0), (2.5, 1.0)]
