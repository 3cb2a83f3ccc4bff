"""Prometheus metrics of a service's journal, computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from services.runtime.journal.journal import Journal, JournalState
from services.runtime.loop_collector import LoopCollector


class JournalMetrics(LoopCollector):
    """Commits, their bytes and time, and what waits. Nothing without a journal."""

    def __init__(self, journal: Callable[[], Journal | None]) -> None:
        super().__init__()
        self._journal = journal

    def read(self) -> list[Metric]:
        journal = self._journal()
        if journal is None:
            return []
        stats = journal.stats
        commits = HistogramMetricFamily("turnout_journal_commit_seconds", "Duration of commits, each of many records.")
        stats.commit_times.show(commits, [])
        return [
            commits,
            CounterMetricFamily("turnout_journal_records", "Records that became durable.", stats.records),
            CounterMetricFamily("turnout_journal_committed_bytes", "Bytes of these records.", stats.committed_bytes),
            GaugeMetricFamily("turnout_journal_pending_records", "Records not durable yet.", stats.pending_records),
            GaugeMetricFamily("turnout_journal_log_bytes", "Log since the last snapshot.", stats.log_bytes),
            GaugeMetricFamily("turnout_journal_wal_bytes", "WAL in use, about.", stats.wal_bytes),
            GaugeMetricFamily(
                "turnout_journal_open", "1 while records are accepted.", journal.state is JournalState.OPEN
            ),
            GaugeMetricFamily(
                "turnout_journal_short_of_space",
                "1 once the disk was full and the reserve is used.",
                journal.short_of_space,
            ),
        ]
