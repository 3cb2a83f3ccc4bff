"""Prometheus metrics of the buffer, computed when they are asked for.

Invariant: the domain is read on the event loop that owns it, never from the thread that serves the metrics.
"""

import asyncio
import threading
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.buffer.desk import Desk

# Wall seconds to wait for the event loop; a scrape that takes longer is better lost.
_TIMEOUT_S = 5.0


class BufferMetrics(Collector):
    """Depth, parked calls, evictions and refill credits of every run."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
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
            yield from asyncio.run_coroutine_threadsafe(read(), self._loop).result(_TIMEOUT_S)
        except (TimeoutError, RuntimeError):
            # The loop is stuck or closed: no metrics are better than a scrape that hangs.
            return

    def _read(self) -> list[Metric]:
        where = ["run_id", "partition"]
        groups = GaugeMetricFamily("turnout_buffer_groups", "Groups present, by state.", labels=[*where, "state"])
        depth = GaugeMetricFamily("turnout_buffer_sampleable", "Groups that Sample could hand out.", labels=where)
        evicted = CounterMetricFamily(
            "turnout_buffer_evictions", "Evicted groups by reason; reasons overlap.", labels=[*where, "reason"]
        )
        credits = CounterMetricFamily(
            "turnout_buffer_refill_credits", "Refill credits created, paid, cancelled.", labels=[*where, "kind"]
        )
        unpaid = GaugeMetricFamily("turnout_buffer_unpaid_credits", "Refill credits not paid yet.", labels=where)
        parked = GaugeMetricFamily("turnout_buffer_parked", "Calls parked on the run.", labels=["run_id"])
        held = GaugeMetricFamily("turnout_buffer_held_bytes", "Bytes held, by declared size.", labels=["run_id"])
        for run in self._desk.runs:
            parked.add_metric([run.run_id], self._desk.parking(run).parked)
            held.add_metric([run.run_id], run.state.payloads.held)
            for partition in run.partitions.values():
                labels = [run.run_id, partition.name]
                counts = partition.index.counts
                for state in ("pending", "running", "finished", "failed", "sampled"):
                    groups.add_metric([*labels, state], getattr(counts, state))
                depth.add_metric(labels, partition.index.sampleable(run.state.step, partition.staleness))
                for reason, count in partition.evictions.total.by_reason.items():
                    evicted.add_metric([*labels, reason.name.lower()], count)
                for kind in ("created", "paid", "cancelled"):
                    credits.add_metric([*labels, kind], getattr(partition.refill, kind))
                unpaid.add_metric(labels, partition.refill.unpaid)
        external = GaugeMetricFamily(
            "turnout_buffer_external_payloads",
            "Payloads in external stores: named, held by checkpoints alone, let go and not acknowledged.",
            labels=["run_id", "state"],
        )
        for run_id, book in self._desk.memory.externals:
            for state, count in (("named", len(book.named)), ("held", len(book.held)), ("let_go", book.waiting_count)):
                external.add_metric([run_id, state], count)
        return [groups, depth, evicted, credits, unpaid, parked, held, external]
