"""Prometheus metrics of a service, and their HTTP endpoint.

Invariants: every service instance has a registry of its own, so that several live in one process; methods that do not
exist make no series.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from threading import Thread
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Histogram, PlatformCollector, ProcessCollector
from prometheus_client import start_http_server as start_prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.runtime.addresses import Address, AddressError, check_free
from services.runtime.discovery import Discovery
from services.runtime.tasks import Tick
from services.runtime.tls import ServerTls

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

SD_PATH: Final = "/sd"
"""Where the list for Prometheus' `http_sd_configs` is."""

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


class MetricsServer:
    """Serves a registry at http://HOST:PORT/metrics (https:// over TLS), and where else metrics are at /sd.

    It runs in a thread of its own.
    """

    def __init__(
        self, address: Address, registry: CollectorRegistry, discovery: Discovery, tls: ServerTls | None = None
    ) -> None:
        check_free(address)
        self._server: WSGIServer
        self._thread: Thread
        try:
            files = {} if tls is None else tls.files
            self._server, self._thread = start_prometheus(address.port, address.host, registry, **files)
        except OSError as error:
            raise AddressError(f"cannot serve metrics on {address}: {error.strerror}") from error
        if tls is not None:
            _keep_fresh(self._server.socket, tls)
        scheme = "http" if tls is None else "https"
        address = address.with_port(self._server.server_port)
        self.url = f"{scheme}://{address}/metrics"
        metrics = self._server.get_app()
        assert metrics is not None

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if environ.get("PATH_INFO") != SD_PATH:
                return metrics(environ, start_response)
            try:
                # Whoever asks reached us under a name that works for it, which a wildcard address is not.
                content = discovery.as_json(f"{scheme}://{environ.get('HTTP_HOST') or address}")
            except (TimeoutError, RuntimeError):
                # With an error Prometheus keeps the targets that it had.
                start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
                return [b"the service does not answer now\n"]
            start_response("200 OK", [("Content-Type", "application/json")])
            return [content]

        self._server.set_app(app)

    def close(self) -> None:
        """Stop serving and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _keep_fresh(listening: Any, tls: ServerTls) -> None:
    # The handshake is for the thread of the request: a silent peer must not keep the others waiting.
    listening.do_handshake_on_connect = False

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = tls.context()

    listening.context.sni_callback = renew
