"""The state that `turnout top` shows is what the run's events say."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from services.views.run_state import RunState
from services.views.top import frame
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2


def run_event(sequence: int, at: float, **event: Any) -> events_pb2.RunEvent:
    """Return an event of a run."""
    return events_pb2.RunEvent(sequence=sequence, at=at, **event)


def counters(standalone: int, hybrid: int) -> events_pb2.ReplicaCounters:
    """Return a reading of two replicas with these tokens."""
    return events_pb2.ReplicaCounters(
        replicas=[
            events_pb2.ReplicaReading(
                replica_id="standalone-0",
                decoded_tokens=standalone,
                running=3,
                route=engine_pb2.ROUTE_STATE_SERVING,
            ),
            events_pb2.ReplicaReading(
                replica_id="hybrid-0", hybrid=True, decoded_tokens=hybrid, route=engine_pb2.ROUTE_STATE_OUT
            ),
        ]
    )


def some_events() -> list[events_pb2.RunEvent]:
    """Return a short life of a run."""
    keep, reclaim = events_pb2.DECISION_ACTION_KEEP, events_pb2.DECISION_ACTION_RECLAIM
    waiting = events_pb2.DECISION_POINT_WAITING
    return [
        run_event(1, 0, run_opened=events_pb2.RunOpened(epoch=3)),
        run_event(2, 1, mode_changed=events_pb2.ModeChanged(to=events_pb2.MODE_ROLLOUT)),
        run_event(3, 1, lend_done=events_pb2.LendDone(cost_seconds=15.0)),
        run_event(4, 2, step_began=events_pb2.StepBegan(step=7)),
        run_event(5, 2, replica_counters=counters(100, 0)),
        run_event(6, 3, depth_observed=events_pb2.DepthObserved(sampleable=20, in_flight=44)),
        run_event(
            7,
            3,
            decision_made=events_pb2.DecisionMade(
                point=waiting, step=7, action=keep, policy="verl", reason="not yet", threshold=26
            ),
        ),
        run_event(8, 12, replica_counters=counters(5100, 0)),
        run_event(
            9,
            12,
            decision_made=events_pb2.DecisionMade(
                point=waiting, step=7, action=reclaim, policy="verl", reason="[red]enough[/red]", threshold=26
            ),
        ),
        run_event(10, 17, reclaim_done=events_pb2.ReclaimDone(cost_seconds=5.0)),
        run_event(11, 17, mode_changed=events_pb2.ModeChanged(to=events_pb2.MODE_TRAINER)),
        run_event(12, 18, starvation_began=events_pb2.StarvationBegan(step=7)),
        run_event(
            13,
            19,
            transition_failed=events_pb2.TransitionFailed(
                transition=events_pb2.TRANSITION_LEND, reason="PARTIAL", message="one of four"
            ),
        ),
    ]


def folded() -> RunState:
    """Return the state after those events."""
    state = RunState()
    for event in some_events():
        state.fold(event)
    return state


def test_events_fold_into_mode_step_depth_threshold_and_counts() -> None:
    """What the first lines of the view say."""
    state = folded()
    assert (state.mode, state.step, state.epoch, state.policy) == ("TRAINER", 7, 3, "verl")
    assert (state.sampleable, state.in_flight, state.threshold) == (20, 44, 26)
    assert (state.lends, state.reclaims, state.starving_since) == (1, 1, 18)


def test_an_event_that_comes_twice_is_folded_once() -> None:
    """A stream that is armed again may repeat an event; a lend counted twice would be a lie."""
    state = folded()
    for event in some_events():
        state.fold(event)
    assert (state.lends, state.reclaims, state.sequence) == (1, 1, 13)


def test_speed_is_measured_between_two_readings() -> None:
    """A rate since the beginning hides that a replica has stopped."""
    assert folded().replicas["standalone-0"].tokens_per_s == 500.0
    assert folded().replicas["hybrid-0"].route == "out"


def test_decisions_that_keep_waiting_are_no_news() -> None:
    """One line per arriving group would push everything else out of the list."""
    texts = [note.text for note in folded().notes]
    assert not any("not yet" in text for text in texts)
    assert any("reclaim" in text for text in texts)


def test_a_frame_shows_it_all_and_reads_no_markup() -> None:
    """Text of a policy or an id may hold brackets; it must be shown, not obeyed."""
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(frame("a[b]c", folded()))
    console.file.close()
    text = console.export_text()
    for part in (
        "a[b]c",
        "TRAINER",
        "20 sampleable of threshold 26",
        "standalone-0",
        "[red]enough[/red]",
        "one of four",
    ):
        assert part in text
    assert "the trainer waits" in text


def test_a_frame_of_nothing_is_a_frame() -> None:
    """`top` starts before the first event."""
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(frame("r", RunState()))
    console.file.close()
    assert "nothing decided yet" in console.export_text()
