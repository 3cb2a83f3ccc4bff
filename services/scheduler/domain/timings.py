"""How long a step waited for its switches.

Invariants: a step's timings start at nothing; waits and reclaims of one step add up, however many calls they took.
"""


class StepTimings:
    """Seconds of the open step, under verl's names."""

    def __init__(self, wait_s: float = 0.0, reclaim_s: float | None = None) -> None:
        self.wait_s = wait_s
        self.reclaim_s = reclaim_s

    def begin_step(self) -> None:
        """Forget the step before."""
        self.wait_s = 0.0
        self.reclaim_s = None

    def waited(self, seconds: float) -> None:
        """PrepareStep waited with the GPUs lent."""
        self.wait_s += seconds

    def reclaimed(self, seconds: float) -> None:
        """A reclaim took so long."""
        self.reclaim_s = (self.reclaim_s or 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """timing_s/switch_wait (0.0 when nothing waited) and, after a reclaim, timing_s/switch_to_trainer."""
        metrics = {"timing_s/switch_wait": self.wait_s}
        if self.reclaim_s is not None:
            metrics["timing_s/switch_to_trainer"] = self.reclaim_s
        return metrics
