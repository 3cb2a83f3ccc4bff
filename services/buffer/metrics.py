"""Prometheus metrics of the buffer, computed when they are asked for."""

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.buffer.desk import Desk
from services.buffer.domain.evictions import EvictionReason
from services.runtime.loop_collector import LoopCollector


class BufferMetrics(LoopCollector):
    """Depth, parked calls, evictions and refill credits of every run."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self._desk = desk

    def read(self) -> list[Metric]:
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
                for reason in EvictionReason:
                    evicted.add_metric([*labels, reason.name.lower()], partition.evictions.total.by_reason[reason])
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
