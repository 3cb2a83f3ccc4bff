"""Who decides in a simulated run.

Invariant: a decider is asked where a run's scheduler asks its policy, and told what happens in the order it happens; it
never changes the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from services.scheduler.policies.types import Decision, Event, Point

if TYPE_CHECKING:
    from services.simulator.run import SimulatedRun


class Decider(Protocol):
    """Answers at every point of a run."""

    @property
    def ticks_s(self) -> float | None:
        """How often `tick` is to be called, in seconds; None for never."""
        ...

    def tell(self, event: Event) -> None:
        """`event` happened."""
        ...

    def tick(self, run: SimulatedRun) -> None:
        """Time for a reading of engines and requests."""
        ...

    def decide(self, point: Point, run: SimulatedRun) -> Decision:
        """What to do at `point`."""
        ...
