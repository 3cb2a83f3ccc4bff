"""Prometheus metrics of a service.

Invariants: every service instance has a registry of its own, so that several live in one process; methods that do not
exist make no series.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.runtime.tasks import Tick

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1200)
"""From a call in memory to a wait that is parked for a whole training step."""

LAG_PERIOD_S: Final = 1.0
"""Often enough to see a blocked loop, and one wake-up a second costs nothing that can be measured."""


def new_registry() -> CollectorRegistry:
    """Return a registry with the figures of the process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class MethodMetrics:
    """Counts the calls of one method, on the event loop alone."""

    __slots__ = ("buckets", "by_code", "in_flight", "method", "seconds")

    def __init__(self, method: str) -> None:
        self.method = method
        self.in_flight = 0
        self.by_code: dict[str, int] = {}
        self.seconds = 0.0
        # Calls by the first bound that they did not pass; those beyond all stand last.
        self.buckets = [0] * (len(_SECONDS) + 1)

    def began(self) -> float:
        """A call begins; returns what `ended` asks for."""
        self.in_flight += 1
        return time.perf_counter()

    def ended(self, began: float, code: str) -> None:
        """A call has ended with `code`."""
        self.in_flight -= 1
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self.buckets[bisect_left(_SECONDS, seconds)] += 1
        self.by_code[code] = self.by_code.get(code, 0) + 1


class CallMetrics(Collector):
    """Calls by method and code, their duration, and those at work.

    Plain numbers that become metrics when they are asked for: the counters of the library take a lock at each step,
    which together costs more than what surrounds a call otherwise.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._methods: list[MethodMetrics] = []
        registry.register(self)

    def of(self, method: str) -> MethodMetrics:
        """Return what counts the calls of a method; to be asked for once."""
        metrics = MethodMetrics(method)
        self._methods.append(metrics)
        return metrics

    def describe(self) -> list[Metric]:
        """The metrics, without samples."""
        return list(self._families([]))

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now; called from the thread that serves them."""
        yield from self._families(list(self._methods))

    @staticmethod
    def _families(methods: list[MethodMetrics]) -> Iterator[Metric]:
        total = CounterMetricFamily("turnout_calls", "Calls ended.", labels=["method", "code"])
        seconds = HistogramMetricFamily("turnout_call_seconds", "Duration of calls.", labels=["method"])
        in_flight = GaugeMetricFamily("turnout_calls_in_flight", "Calls at work, parked ones too.", labels=["method"])
        for method in methods:
            for code, count in list(method.by_code.items()):
                total.add_metric([method.method, code], count)
            sums = list(accumulate(method.buckets))
            bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
            seconds.add_metric([method.method], list(zip(bounds, sums, strict=True)), method.seconds)
            in_flight.add_metric([method.method], method.in_flight)
        yield from (total, seconds, in_flight)


class LoopLag:
    """How late the event loop runs what is due: a blocked loop shows here before anywhere else."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "turnout_event_loop_lag_seconds",
            "How much later than due a timer ran.",
            buckets=_SECONDS[:12],
            registry=registry,
        )

    async def loop(self, tick: Tick) -> None:
        """Measure until cancelled."""
        while True:
            due = time.perf_counter() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag.observe(max(0.0, time.perf_counter() - due))
            tick()
