"""Prometheus metrics of the scheduler.

Invariant: every figure is counted from the run's events, so metrics and WatchRun never disagree.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.scheduler.domain import events
from services.scheduler.domain.run import Run

_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
"""From a switch of small models to one that hangs until its deadline."""


class SchedulerMetrics:
    """The figures of all runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._mode = Gauge("turnout_run_mode", "1 for the mode the run is in.", ["run_id", "mode"], registry=registry)
        self._lends = Counter("turnout_lends_total", "Lends completed.", ["run_id", "kind"], registry=registry)
        self._lend_seconds = Histogram(
            "turnout_lend_seconds", "Domain seconds of a lend.", ["run_id"], buckets=_SECONDS, registry=registry
        )
        self._reclaim_seconds = Histogram(
            "turnout_reclaim_seconds", "Domain seconds of a reclaim.", ["run_id"], buckets=_SECONDS, registry=registry
        )
        self._waits = Histogram(
            "turnout_sample_wait_seconds",
            "Domain seconds the trainer waited for a mini-batch.",
            ["run_id"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._decisions = Counter(
            "turnout_decisions_total", "Decisions made.", ["run_id", "point", "action"], registry=registry
        )
        self._failures = Counter(
            "turnout_transition_failures_total", "Transitions that failed.", ["run_id", "transition"], registry=registry
        )

    def follow(self, run: Run) -> None:
        """Count the run's events from now on."""
        counted = run.log.last

        def count() -> None:
            nonlocal counted
            if run.log.ended:
                return
            for placed in run.log.read(counted + 1, run.log.last - counted):
                self._count(run, placed.event)
            counted = run.log.last

        run.log.listen(count)
        self._show_mode(run)

    def _count(self, run: Run, event: events.Happening) -> None:
        match event:
            case events.ModeChanged():
                self._show_mode(run)
            case events.LendDone():
                self._lends.labels(run.run_id, event.kind.name.lower()).inc()
                self._lend_seconds.labels(run.run_id).observe(event.cost_seconds)
            case events.ReclaimDone():
                self._reclaim_seconds.labels(run.run_id).observe(event.cost_seconds)
            case events.MiniBatchEnded():
                self._waits.labels(run.run_id).observe(event.wait_seconds)
            case events.DecisionMade():
                self._decisions.labels(run.run_id, event.point.name.lower(), event.action.name.lower()).inc()
            case events.TransitionFailed():
                self._failures.labels(run.run_id, event.transition.name.lower()).inc()

    def _show_mode(self, run: Run) -> None:
        for mode in events.Mode:
            self._mode.labels(run.run_id, mode.name.lower()).set(run.mode is mode)
