"""How long something took, over and over: plain numbers that become a Prometheus histogram when they are asked for.

The histograms of the library take a lock at each step, which is dear beside what is measured here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Durations:
    """Counts durations, in seconds, by the first of the ascending `bounds` that they did not pass."""

    __slots__ = ("_bounds", "_buckets", "count", "seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        # Those beyond all bounds stand last.
        self._buckets = [0] * (len(self._bounds) + 1)
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self._buckets[bisect_left(self._bounds, seconds)] += 1
        self.count += 1
        self.seconds += seconds

    def show(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add them to a metric that is being collected."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        sums = list(accumulate(self._buckets))
        family.add_metric(labels, list(zip(bounds, sums, strict=True)), self.seconds)
