"""The trainer's pace and the cost of moving GPUs, learned from the last of each.

Invariant: a mean of costs is over the last few, so a cold first one leaves.
"""

from services.scheduler.policies.costs import SwitchCosts
from services.scheduler.policies.types import (
    Event,
    LendDone,
    MiniBatchBegan,
    MiniBatchEnded,
    ReclaimDone,
    SyncDone,
)

_KEEP = 0.7
"""Weight of the past in every moving average."""


class Rhythm:
    """Feed it every event."""

    def __init__(self, window: int) -> None:
        self._costs = SwitchCosts(window)
        self._cold_lend_s: float | None = None
        self._mini_batch_at: float | None = None
        self.mini_batch_s: float | None = None
        self.sync_s = 0.0
        self._synced = False

    @property
    def lend_s(self) -> float:
        """Seconds of a lend. Before the first, that of the run's start, which engines begin cold."""
        known = self._costs.lend.mean()
        return known if known is not None else self._cold_lend_s or 0.0

    @property
    def reclaim_s(self) -> float:
        """Seconds of a reclaim."""
        return self._costs.reclaim.mean() or 0.0

    def resize(self, window: int) -> None:
        """Average the last `window` costs from now on."""
        self._costs.resize(window)

    def numbers(self, now: float) -> dict[str, float]:
        """What is known, by name."""
        return self._costs.numbers(now)

    def observe(self, event: Event) -> None:
        """Take note."""
        match event:
            case LendDone(counted=True):
                self._costs.lend.add(event.cost_s, event.at)
            case LendDone():
                self._cold_lend_s = event.cost_s
            case ReclaimDone(counted=True):
                self._costs.reclaim.add(event.cost_s, event.at)
            case SyncDone():
                self.sync_s = event.cost_s if not self._synced else _KEEP * self.sync_s + (1 - _KEEP) * event.cost_s
                self._synced = True
            case MiniBatchBegan():
                self._mini_batch_at = event.at
            case MiniBatchEnded() if self._mini_batch_at is not None:
                took = event.at - self._mini_batch_at
                self._mini_batch_at = None
                known = self.mini_batch_s
                self.mini_batch_s = took if known is None else _KEEP * known + (1 - _KEEP) * took
