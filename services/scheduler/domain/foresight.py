"""What each step was predicted to wait, against what it did wait.

The prediction of a reclaim belongs to its step, that of not lending at a step's end to the next; the last one counts.
"""

from __future__ import annotations

from services.scheduler.domain import events
from services.scheduler.domain.events import DecisionAction, DecisionPoint


class Foresight:
    """Show it every event of a run, in order."""

    def __init__(self) -> None:
        self._predicted_s: float | None = None
        self._waited_s = 0.0

    def read(self, event: events.Happening) -> tuple[float, float] | None:
        """Predicted and realised wait of the step that `event` ends, in seconds; None unless both are known."""
        match event:
            case events.DecisionMade():
                self._decided(event)
            case events.StepBegan():
                self._waited_s = 0.0
            case events.RunOpened():
                self._predicted_s = None
            case events.MiniBatchEnded():
                self._waited_s += event.wait_seconds
            case events.StepEnded():
                predicted_s, self._predicted_s = self._predicted_s, None
                return None if predicted_s is None else (predicted_s, self._waited_s)
        return None

    def _decided(self, made: events.DecisionMade) -> None:
        if made.predicted_wait_seconds is None:
            return
        stays = made.point is DecisionPoint.STEP_END and made.action is DecisionAction.KEEP
        if stays or made.action is DecisionAction.RECLAIM:
            self._predicted_s = made.predicted_wait_seconds
