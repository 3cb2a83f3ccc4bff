"""Prometheus metrics of the scheduler.

Invariant: every figure is counted from the run's events, so metrics and WatchRun never disagree.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.scheduler.domain import events
from services.scheduler.domain.foresight import Foresight
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

        self._predicted_waits = Histogram(
            "turnout_predicted_wait_seconds",
            "Domain seconds that a step was predicted to wait for rollouts, where the policy predicts.",
            ["run_id"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._realised_waits = Histogram(
            "turnout_realised_wait_seconds",
            "Domain seconds that these steps did wait.",
            ["run_id"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._wait_errors = Histogram(
            "turnout_wait_error_seconds",
            "Size of predicted less realised wait of a step, domain seconds.",
            ["run_id"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._lent_tokens = Counter(
            "turnout_lent_tokens_total",
            "Tokens decoded on lent GPUs, and tokens of trajectories that ended there.",
            ["run_id", "what"],
            registry=registry,
        )
        self._gained = Gauge(
            "turnout_lends_gained_seconds",
            "Domain seconds that lends gained since this process began: predicted wait without, less what was lost.",
            ["run_id"],
            registry=registry,
        )

    def follow(self, run: Run) -> None:
        """Count the run's events from now on."""
        counted = run.log.last
        foresight = Foresight()

        def count() -> None:
            nonlocal counted
            if run.log.ended:
                return
            for placed in run.log.read(counted + 1, run.log.last - counted):
                self._count(run, placed.event)
                waits = foresight.read(placed.event)
                if waits is not None:
                    self._compare(run, *waits)
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
            case events.LendGoodput():
                self._lent_tokens.labels(run.run_id, "decoded").inc(event.decoded_tokens)
                self._lent_tokens.labels(run.run_id, "delivered").inc(event.delivered_tokens)
                if event.gained_seconds is not None:
                    self._gained.labels(run.run_id).inc(event.gained_seconds)
            case events.TransitionFailed():
                self._failures.labels(run.run_id, event.transition.name.lower()).inc()

    def _compare(self, run: Run, predicted_s: float, realised_s: float) -> None:
        self._predicted_waits.labels(run.run_id).observe(predicted_s)
        self._realised_waits.labels(run.run_id).observe(realised_s)
        self._wait_errors.labels(run.run_id).observe(abs(predicted_s - realised_s))

    def _show_mode(self, run: Run) -> None:
        for mode in events.Mode:
            self._mode.labels(run.run_id, mode.name.lower()).set(run.mode is mode)
