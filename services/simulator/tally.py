"""What a simulated run comes to.

Invariant: sums only grow; a step is added once, when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepTally:
    """One step: its times in seconds, and sums over the trajectories it trained on.

    wait_s: waited for mini-batches. lent_wait_s: waited while GPUs were lent. reclaimed_at, reclaimed_depth: when and
    at how many sampleable groups they came back, None if they were not lent.
    """

    step: int
    began_at: float = 0.0
    ended_at: float = 0.0
    wait_s: float = 0.0
    lent_wait_s: float = 0.0
    train_s: float = 0.0
    sync_s: float = 0.0
    lend_s: float = 0.0
    reclaim_s: float = 0.0
    reclaimed_at: float | None = None
    reclaimed_depth: int | None = None
    decisions: int = 0
    trajectories: int = 0
    spans: int = 0
    staleness: int = 0


@dataclass(slots=True)
class Tally:
    """The run so far."""

    lends: int = 0
    trained_groups: int = 0
    steps: list[StepTally] = field(default_factory=list)

    def copy(self) -> Tally:
        """An independent tally; steps that ended are shared, since they never change."""
        return Tally(self.lends, self.trained_groups, self.steps.copy())

    def add(self, step: StepTally) -> None:
        """A step ended."""
        self.steps.append(step)
