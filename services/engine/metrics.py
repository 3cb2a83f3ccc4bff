"""Prometheus metrics of the engine controller, computed when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from services.engine.controller import Controller
from services.engine.slot import Slot
from services.runtime.loop_collector import LoopCollector

_REPLICA = ("replica_id", "role")


class EngineMetrics(LoopCollector):
    """State, load, commands and deaths of every replica that is registered."""

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self._controller = controller

    def read(self) -> list[Metric]:
        sinks = GaugeMetricFamily(
            "turnout_engine_route_sink_current", "1 if it took the present routes.", labels=["sink"]
        )
        for name, current in self._controller.publisher.current.items():
            sinks.add_metric([name], current)
        slots = self._controller.fleet.all
        return [sinks, *self._states(slots), *self._loads(slots), *_commands(slots)]

    @staticmethod
    def _states(slots: list[Slot]) -> Iterator[Metric]:
        route = GaugeMetricFamily("turnout_engine_route", "1 for the present route.", labels=[*_REPLICA, "route"])
        health = GaugeMetricFamily("turnout_engine_health", "1 for the present health.", labels=[*_REPLICA, "health"])
        weights = GaugeMetricFamily(
            "turnout_engine_weights", "1 for what the weight memory holds.", labels=[*_REPLICA, "weights"]
        )
        level = GaugeMetricFamily("turnout_engine_sleep_level", "Sleep level, 0 while awake.", labels=_REPLICA)
        version = GaugeMetricFamily("turnout_engine_weight_version", "Version of the base weights.", labels=_REPLICA)
        deaths = CounterMetricFamily("turnout_engine_deaths", "Times the engine was found dead.", labels=_REPLICA)
        for slot in slots:
            replica, labels = slot.replica, _labels(slot)
            route.add_metric([*labels, replica.route.value], 1)
            health.add_metric([*labels, replica.health.value], 1)
            weights.add_metric([*labels, replica.weights.value], 1)
            level.add_metric(labels, replica.state.sleep_level)
            version.add_metric(labels, replica.weight_version)
            deaths.add_metric(labels, slot.tally.deaths)
        yield from (route, health, weights, level, version, deaths)

    def _loads(self, slots: list[Slot]) -> Iterator[Metric]:
        requests = GaugeMetricFamily(
            "turnout_engine_requests", "Requests placed, by whether they run.", labels=[*_REPLICA, "state"]
        )
        memory = GaugeMetricFamily("turnout_engine_memory_bytes", "Bytes held on devices.", labels=_REPLICA)
        placement = self._controller.fleet.placement
        for slot in slots:
            labels, running = _labels(slot), len(slot.forwards)
            requests.add_metric([*labels, "running"], running)
            requests.add_metric([*labels, "parked"], max(0, placement.load(slot.replica_id) - running))
            if slot.replica.state.memory_bytes is not None:
                memory.add_metric(labels, slot.replica.state.memory_bytes)
        yield from (requests, memory)


def _labels(slot: Slot) -> list[str]:
    return [slot.replica_id, slot.replica.spec.role.value]


def _commands(slots: list[Slot]) -> Iterator[Metric]:
    where = [*_REPLICA, "command"]
    seconds = SummaryMetricFamily("turnout_engine_command_seconds", "Wall seconds of engine commands.", labels=where)
    failures = CounterMetricFamily("turnout_engine_command_failures", "Commands that failed.", labels=where)
    for slot in slots:
        for name, done in slot.tally.commands.items():
            labels = [*_labels(slot), name]
            seconds.add_metric(labels, done.count, done.seconds)
            failures.add_metric(labels, done.failures)
    yield from (seconds, failures)
