"""Prometheus metrics of the engine controller, computed when they are asked for.

Invariant: the fleet is read on the event loop that owns it, never from the thread that serves the metrics.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.engine.controller import Controller
from services.engine.domain.spec import Health

TIMEOUT_S: Final = 5.0
"""Wall seconds to wait for the event loop; a scrape that takes longer is better lost."""


class EngineMetrics(Collector):
    """Route, health, versions, memory and load of every replica."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def describe(self) -> list[Metric]:
        """Nothing: registering must not compute the metrics."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        if threading.get_ident() == self._thread:
            yield from self._read()
            return

        async def read() -> list[Metric]:
            return self._read()

        try:
            yield from asyncio.run_coroutine_threadsafe(read(), self._loop).result(TIMEOUT_S)
        except (TimeoutError, RuntimeError):
            # The loop is stuck or closed: no metrics are better than a scrape that hangs.
            return

    def _read(self) -> list[Metric]:
        where = ["replica_id", "role"]
        route = GaugeMetricFamily("turnout_engine_route", "1 for the present route.", labels=[*where, "route"])
        healthy = GaugeMetricFamily("turnout_engine_healthy", "1 if the engine answers.", labels=where)
        version = GaugeMetricFamily("turnout_engine_weight_version", "Version of the base weights.", labels=where)
        requests = GaugeMetricFamily(
            "turnout_engine_requests", "Requests placed, by whether they run.", labels=[*where, "state"]
        )
        memory = GaugeMetricFamily("turnout_engine_memory_bytes", "Bytes held on devices.", labels=where)
        sinks = GaugeMetricFamily(
            "turnout_engine_route_sink_current", "1 if it took the present routes.", labels=["sink"]
        )
        for name, current in self._controller.publisher.current.items():
            sinks.add_metric([name], current)
        fleet = self._controller.fleet
        for slot in fleet.all:
            replica = slot.replica
            labels = [slot.replica_id, replica.spec.role.value]
            running = len(slot.forwards)
            route.add_metric([*labels, replica.route.value], 1)
            healthy.add_metric(labels, replica.health is Health.HEALTHY)
            version.add_metric(labels, replica.weight_version)
            requests.add_metric([*labels, "running"], running)
            requests.add_metric([*labels, "parked"], max(0, fleet.placement.load(slot.replica_id) - running))
            if replica.state.memory_bytes is not None:
                memory.add_metric(labels, replica.state.memory_bytes)
        return [route, healthy, version, requests, memory, sinks]
