"""Axes and lines of charts; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


@dataclass(frozen=True, slots=True)
class Scale:
    """A stretch of time."""

    start: float
    end: float

    def share(self, at: float) -> float:
        """Where `at` lies, 0 to 1."""
        return min(max((at - self.start) / (self.end - self.start), 0.0), 1.0)

    def ticks(self, most: int = 12) -> list[float]:
        """Round moments, at most so many."""
        step = next((s for s in _TIME_STEPS if (self.end - self.start) / s <= most), _TIME_STEPS[-1])
        first = floor(self.start / step) + (self.start % step > 0)
        return [number * step for number in range(int(first), int(self.end // step) + 1)]


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, near `rough`, which is above 0."""
    power = 10 ** floor(log10(rough))
    return float(power * next((n for n in (1, 2, 5) if n * power >= rough), 10))


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """The points of a line, at most about `most`: of each stretch of them the least and the greatest are kept."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // (most // 2))
    kept: list[tuple[float, float]] = []
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        low, high = min(stretch, key=_value), max(stretch, key=_value)
        kept += sorted({low, high})
    return kept


def _value(point: tuple[float, float]) -> float:
    return point[1]
