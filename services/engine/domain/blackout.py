"""How long nothing was decoding.

Invariant: time counts only between two `change` calls of which the earlier said that no replica serves. Times are
domain seconds, handed in.
"""

from __future__ import annotations


class BlackoutMeter:
    """Adds up the time during which no replica served."""

    def __init__(self, now: float) -> None:
        self._dark_since: float | None = now
        self._total = 0.0

    def change(self, now: float, serving: bool) -> None:
        """From `now` on some replica serves, or none does."""
        self._total = self.total(now)
        self._dark_since = None if serving else now

    def total(self, now: float) -> float:
        """Dark seconds so far."""
        return self._total + (0.0 if self._dark_since is None else max(0.0, now - self._dark_since))
