"""What is known of a run, folded from its events; pure.

Invariants: events are folded once each, in order; a state made from the first n events is the same whether they came
one by one or in batches; only the newest decisions and moves are kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2

KEPT_NOTES: Final = 12
"""More than a terminal shows beside the rest."""

_MODES: Final = {
    events_pb2.MODE_TRAINER: "TRAINER",
    events_pb2.MODE_LENDING: "LENDING",
    events_pb2.MODE_ROLLOUT: "ROLLOUT",
    events_pb2.MODE_RECLAIMING: "RECLAIMING",
}
_POINTS: Final = {
    events_pb2.DECISION_POINT_STEP_BEGIN: "step begin",
    events_pb2.DECISION_POINT_WAITING: "waiting",
    events_pb2.DECISION_POINT_SAMPLE_BEGIN: "sample begin",
    events_pb2.DECISION_POINT_STEP_END: "step end",
}
_ACTIONS: Final = {
    events_pb2.DECISION_ACTION_KEEP: "keep",
    events_pb2.DECISION_ACTION_LEND: "lend",
    events_pb2.DECISION_ACTION_RECLAIM: "reclaim",
}
_ROUTES: Final = {
    engine_pb2.ROUTE_STATE_OUT: "out",
    engine_pb2.ROUTE_STATE_HELD: "held",
    engine_pb2.ROUTE_STATE_SERVING: "serving",
}
_TRANSITIONS: Final = {
    events_pb2.TRANSITION_LEND: "lend",
    events_pb2.TRANSITION_RECLAIM: "reclaim",
    events_pb2.TRANSITION_ABORT_LEND: "undoing a lend",
}


def mode_name(mode: events_pb2.Mode.ValueType) -> str:
    """Return the word for a mode."""
    return _MODES.get(mode, "unknown")


def point_name(point: events_pb2.DecisionPoint.ValueType) -> str:
    """Return the words for a decision point."""
    return _POINTS.get(point, "unknown")


def action_name(action: events_pb2.DecisionAction.ValueType) -> str:
    """Return the word for an action."""
    return _ACTIONS.get(action, "unknown")


def lent_seconds(reclaimed: events_pb2.RunEvent, began_at: float) -> float:
    """How long the GPUs were lent in a step that began at `began_at`, until they were ordered back by this reclaim."""
    return max(reclaimed.at - reclaimed.reclaim_done.cost_seconds - began_at, 0.0)


def route_name(route: engine_pb2.RouteState.ValueType) -> str:
    """Return the word for a route."""
    return _ROUTES.get(route, "unknown")


@dataclass(slots=True)
class ReplicaState:
    """One replica as last read."""

    replica_id: str
    hybrid: bool
    route: str = "out"
    running: int = 0
    decoded_tokens: int = 0
    tokens_per_s: float = 0.0
    """Between the last two readings."""


@dataclass(frozen=True, slots=True)
class Note:
    """A decision or a move, for the list of what happened last."""

    at: float
    text: str
    kind: str
    """`decision`, `move` or `trouble`."""


@dataclass(slots=True)
class RunState:
    """A run, as its events tell."""

    sequence: int = 0
    at: float = 0.0
    """Seconds of the run's clock at the last event."""

    mode: str = "unknown"
    policy: str = ""
    epoch: int = 0
    step: int = 0
    closed: bool = False
    sampleable: int = 0
    in_flight: int = 0
    unpaid_credits: int = 0
    threshold: int | None = None
    starving_since: float | None = None
    waited_s: float = 0.0
    """Seconds the trainer waited for mini-batches so far."""

    lends: int = 0
    reclaims: int = 0
    replicas: dict[str, ReplicaState] = field(default_factory=dict)
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=KEPT_NOTES))
    _counted_at: float | None = None

    def fold(self, event: events_pb2.RunEvent) -> None:
        """Take in one event; one that was folded before changes nothing."""
        if event.sequence <= self.sequence:
            return
        self.sequence = event.sequence
        self.at = max(self.at, event.at)
        name = event.WhichOneof("event")
        if name is not None and (handler := _HANDLERS.get(name)) is not None:
            handler(self, event)

    def _note(self, event: events_pb2.RunEvent, kind: str, text: str) -> None:
        self.notes.append(Note(event.at, text, kind))

    def _run_opened(self, event: events_pb2.RunEvent) -> None:
        self.epoch, self.step, self.closed = event.run_opened.epoch, event.run_opened.step, False
        self._note(event, "move", f"opened with epoch {self.epoch}")

    def _run_closed(self, event: events_pb2.RunEvent) -> None:
        self.closed = True
        self._note(event, "move", f"closed: {event.run_closed.reason or 'no reason given'}")

    def _depth_observed(self, event: events_pb2.RunEvent) -> None:
        depth = event.depth_observed
        self.sampleable, self.in_flight, self.unpaid_credits = depth.sampleable, depth.in_flight, depth.unpaid_credits

    def _step_began(self, event: events_pb2.RunEvent) -> None:
        self.step = event.step_began.step

    def _mini_batch_ended(self, event: events_pb2.RunEvent) -> None:
        self.waited_s += event.mini_batch_ended.wait_seconds

    def _starvation_began(self, event: events_pb2.RunEvent) -> None:
        self.starving_since = event.at

    def _starvation_ended(self, event: events_pb2.RunEvent) -> None:
        self.starving_since = None

    def _lend_done(self, event: events_pb2.RunEvent) -> None:
        self.lends += 1
        self._note(event, "move", f"lent in {event.lend_done.cost_seconds:.1f} s")

    def _lend_abandoned(self, event: events_pb2.RunEvent) -> None:
        self._note(event, "trouble", f"lend abandoned: {event.lend_abandoned.reason}")

    def _reclaim_done(self, event: events_pb2.RunEvent) -> None:
        self.reclaims += 1
        self._note(event, "move", f"taken back in {event.reclaim_done.cost_seconds:.1f} s")

    def _transition_failed(self, event: events_pb2.RunEvent) -> None:
        failed = event.transition_failed
        what = _TRANSITIONS.get(failed.transition, "transition")
        self._note(event, "trouble", f"{what} failed ({failed.reason}): {failed.message}")

    def _mode_changed(self, event: events_pb2.RunEvent) -> None:
        self.mode = mode_name(event.mode_changed.to)

    def _decision_made(self, event: events_pb2.RunEvent) -> None:
        decision = event.decision_made
        if decision.shadow:
            return
        self.policy = decision.policy
        if decision.HasField("threshold"):
            self.threshold = decision.threshold
        action = action_name(decision.action)
        text = f"step {decision.step}, {point_name(decision.point)}: {action} ({decision.reason})"
        if decision.action == events_pb2.DECISION_ACTION_KEEP and decision.point == events_pb2.DECISION_POINT_WAITING:
            # Asked at every arrival: the answer "not yet" is no news.
            return
        self._note(event, "decision", text)

    def _replica_counters(self, event: events_pb2.RunEvent) -> None:
        elapsed = event.at - self._counted_at if self._counted_at is not None else 0.0
        self._counted_at = event.at
        seen = {}
        for reading in event.replica_counters.replicas:
            before = self.replicas.get(reading.replica_id)
            made = reading.decoded_tokens - before.decoded_tokens if before is not None else 0
            seen[reading.replica_id] = ReplicaState(
                reading.replica_id,
                reading.hybrid,
                route_name(reading.route),
                reading.running,
                reading.decoded_tokens,
                # A replica that registered anew counts from zero.
                max(made, 0) / elapsed if elapsed > 0 else 0.0,
            )
        self.replicas = seen


_HANDLERS: Final = {
    "run_opened": RunState._run_opened,
    "run_closed": RunState._run_closed,
    "depth_observed": RunState._depth_observed,
    "step_began": RunState._step_began,
    "mini_batch_ended": RunState._mini_batch_ended,
    "starvation_began": RunState._starvation_began,
    "starvation_ended": RunState._starvation_ended,
    "lend_done": RunState._lend_done,
    "lend_abandoned": RunState._lend_abandoned,
    "reclaim_done": RunState._reclaim_done,
    "transition_failed": RunState._transition_failed,
    "mode_changed": RunState._mode_changed,
    "decision_made": RunState._decision_made,
    "replica_counters": RunState._replica_counters,
}
