"""Prometheus metrics of a service, and their HTTP endpoint.

Invariants: every service instance has a registry of its own, so that several live in one process; methods that do not
exist make no series.
"""

from __future__ import annotations

import asyncio
import time
from threading import Thread
from typing import Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client import start_http_server as start_prometheus

from services.runtime.addresses import Address, AddressError, check_free
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


class CallMetrics:
    """Counts calls by method and code, their duration, and those at work."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter("turnout_calls_total", "Calls ended.", ["method", "code"], registry=registry)
        self._seconds = Histogram(
            "turnout_call_seconds", "Duration of calls.", ["method"], buckets=_SECONDS, registry=registry
        )
        self._in_flight = Gauge(
            "turnout_calls_in_flight", "Calls at work, parked ones too.", ["method"], registry=registry
        )

    def of(self, method: str) -> MethodMetrics:
        """Return what counts the calls of a method; to be kept, since finding the series again costs at every call."""
        return MethodMetrics(self._in_flight.labels(method), self._seconds.labels(method), self._total, method)


class MethodMetrics:
    """Counts the calls of one method."""

    __slots__ = ("_by_code", "_in_flight", "_method", "_seconds", "_total")

    def __init__(self, in_flight: Gauge, seconds: Histogram, total: Counter, method: str) -> None:
        self._in_flight = in_flight
        self._seconds = seconds
        self._total = total
        self._method = method
        self._by_code: dict[str, Counter] = {}

    def began(self) -> float:
        """A call begins; returns what `ended` asks for."""
        self._in_flight.inc()
        return time.perf_counter()

    def ended(self, began: float, code: str) -> None:
        """A call has ended with `code`."""
        self._in_flight.dec()
        self._seconds.observe(time.perf_counter() - began)
        counter = self._by_code.get(code)
        if counter is None:
            counter = self._by_code[code] = self._total.labels(self._method, code)
        counter.inc()


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


class MetricsServer:
    """Serves a registry at http://HOST:PORT/metrics from a thread of its own."""

    def __init__(self, address: Address, registry: CollectorRegistry) -> None:
        check_free(address)
        self._server: WSGIServer
        self._thread: Thread
        try:
            self._server, self._thread = start_prometheus(address.port, address.host, registry)
        except OSError as error:
            raise AddressError(f"cannot serve metrics on {address}: {error.strerror}") from error
        self.url = f"http://{address.with_port(self._server.server_port)}/metrics"

    def close(self) -> None:
        """Stop serving and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
