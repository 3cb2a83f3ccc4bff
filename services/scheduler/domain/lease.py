"""The trainer's lease: whether the holder of the present epoch lives.

Invariants: every call with the present epoch renews it; while a call is parked it cannot run out; losing it permits a
newer epoch and does nothing else.
"""

import math


class TrainerLease:
    """A lease of `duration_s` seconds, running from `now`."""

    def __init__(self, duration_s: float, now: float) -> None:
        self.duration_s = duration_s
        self._renewed_at = now
        self._parked = 0

    def lapse(self) -> None:
        """It has run out."""
        self._renewed_at = -math.inf

    def renew(self, now: float) -> None:
        """The trainer gave a sign of life."""
        self._renewed_at = now

    def park(self) -> None:
        """A call of the trainer is under way."""
        self._parked += 1

    def unpark(self, now: float) -> None:
        """It ended."""
        self._parked -= 1
        self._renewed_at = now

    def left_s(self, now: float) -> float:
        """Seconds until it runs out, 0 once it has."""
        if self._parked:
            return self.duration_s
        return max(0.0, self._renewed_at + self.duration_s - now)
