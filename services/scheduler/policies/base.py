"""What every policy is.

Invariants: all a policy knows reached it through `observe`, in the order it happened, so that replaying a journal
reproduces every decision; `decide` changes nothing, so asking twice gives the same answer twice.
"""

from typing import Protocol

from services.scheduler.policies.types import Decision, Event, Point


class Policy(Protocol):
    """Decides when a run's hybrid GPUs move. Pure: no clock, no I/O."""

    @property
    def name(self) -> str:
        """The name it is created by."""
        ...

    def observe(self, event: Event) -> None:
        """Take note of an event; events of no interest are ignored.

        Raises FieldError for a measured duration that is negative or not finite; the policy is then unchanged.
        """
        ...

    def decide(self, point: Point, now: float) -> Decision:
        """Answer at `point`, at time `now`. Raises EventOrderError if events the answer rests on are missing."""
        ...
