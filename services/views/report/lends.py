"""What each lend cost and what it brought; pure.

Invariant: what a lend brought is what the scheduler told of it once it was known; nothing is counted a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.views.run_state import mode_name
from turnout.scheduler.v1 import events_pb2

_KINDS = {
    events_pb2.LEND_KIND_INIT: "at the start",
    events_pb2.LEND_KIND_STEP_END: "at a step's end",
    events_pb2.LEND_KIND_WITHIN_STEP: "within a step",
    events_pb2.LEND_KIND_VALIDATION: "for validation",
}


@dataclass(slots=True)
class Lend:
    """served_at: when the replicas began to serve. back_at: when the trainer was sure of its GPUs, None while lent.
    brought: the scheduler's account of it, None before it told."""

    lend_id: str
    kind: str
    served_at: float
    cost_s: float
    back_at: float | None = None
    reclaim_s: float = 0.0
    ordered_back_at: float | None = None
    brought: events_pb2.LendGoodput | None = None

    @property
    def gained_s(self) -> float | None:
        """Seconds gained against the wait that was predicted without the lend, lost if negative; None if unknown."""
        brought = self.brought
        return brought.gained_seconds if brought is not None and brought.HasField("gained_seconds") else None

    @property
    def served_s(self) -> float | None:
        """Seconds between serving and the order to come back."""
        return None if self.ordered_back_at is None else max(self.ordered_back_at - self.served_at, 0.0)

    @property
    def switch_s(self) -> float:
        """Seconds of switching, both ways."""
        return self.cost_s + self.reclaim_s

    @property
    def saved_s(self) -> float | None:
        """Seconds that the job gained at most, lost if negative; None if unknown."""
        brought = self.brought
        known = brought is not None and brought.HasField("saved_at_most_seconds")
        return brought.saved_at_most_seconds if brought is not None and known else None


class Lends:
    """Feed it every event, in order."""

    def __init__(self) -> None:
        self.all: list[Lend] = []

    @property
    def _open(self) -> Lend | None:
        return self.all[-1] if self.all and self.all[-1].back_at is None else None

    def fold(self, event: events_pb2.RunEvent) -> None:
        """Take in one event."""
        lend = self._open
        match event.WhichOneof("event"):
            case "lend_done":
                self._begin(event.at, event.lend_done)
            case "reclaim_done" if lend is not None:
                lend.back_at, lend.reclaim_s = event.at, event.reclaim_done.cost_seconds
                if lend.ordered_back_at is None:
                    lend.ordered_back_at = event.at - lend.reclaim_s
            case "lend_goodput":
                self._settle(event.lend_goodput)
            case "mode_changed" if lend is not None and mode_name(event.mode_changed.to) == "RECLAIMING":
                lend.ordered_back_at = event.at
            case _:
                return

    def _begin(self, at: float, done: events_pb2.LendDone) -> None:
        self.all.append(Lend(done.lend_id, _KINDS.get(done.kind, "unknown"), at, done.cost_seconds))

    def _settle(self, told: events_pb2.LendGoodput) -> None:
        for lend in reversed(self.all):
            if lend.lend_id == told.lend_id:
                lend.brought = told
                break
