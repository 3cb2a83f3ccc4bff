"""Prometheus metrics of the scheduler.

Invariants: what happened is counted from the run's events, so metrics and WatchRun never disagree; a run that is
forgotten leaves no series.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from services.runtime.clock import Clock
from services.runtime.loop_collector import LoopCollector
from services.scheduler.domain import events
from services.scheduler.domain.foresight import Foresight
from services.scheduler.domain.run import Run

_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
"""From a switch of small models to one that hangs until its deadline."""

M = TypeVar("M", bound=MetricWrapperBase)


class SchedulerMetrics:
    """What happened in all runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["run_id", *labels], registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, ["run_id"], buckets=_SECONDS, registry=registry)

        self._series: dict[str, set[tuple[MetricWrapperBase, tuple[str, ...]]]] = {}
        self._mode = Gauge("turnout_run_mode", "1 for the mode the run is in.", ["run_id", "mode"], registry=registry)
        self._lends = counter("turnout_lends_total", "Lends completed.", "kind")
        self._lend_seconds = histogram("turnout_lend_seconds", "Domain seconds of a lend.")
        self._reclaim_seconds = histogram("turnout_reclaim_seconds", "Domain seconds of a reclaim.")
        self._waits = histogram("turnout_sample_wait_seconds", "Domain seconds the trainer waited for a mini-batch.")
        self._decisions = counter("turnout_decisions_total", "Decisions made.", "point", "action")
        self._failures = counter("turnout_transition_failures_total", "Transitions that failed.", "transition")
        self._predicted_waits = histogram(
            "turnout_predicted_wait_seconds",
            "Domain seconds that a step was predicted to wait for rollouts, where the policy predicts.",
        )
        self._realised_waits = histogram("turnout_realised_wait_seconds", "Domain seconds that these steps did wait.")
        self._wait_errors = histogram(
            "turnout_wait_error_seconds", "Size of predicted less realised wait of a step, domain seconds."
        )
        self._accounts = counter("turnout_lend_accounts_total", "Lends whose account is closed: what they brought.")
        self._lent_tokens = counter(
            "turnout_lent_tokens_total",
            "Tokens decoded on lent GPUs, and tokens of trajectories that ended there.",
            "what",
        )
        self._switch_seconds = counter(
            "turnout_lend_switch_seconds_total", "Domain seconds that these lends spent switching, both ways."
        )
        self._lost_seconds = counter(
            "turnout_lend_lost_seconds_total", "Domain seconds the trainer waited and switched because of these lends."
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
        # From 0, so that the first failure is a change that an alert sees.
        for transition in events.Transition:
            self._of(run, self._failures, transition.name.lower())

    def forget(self, run_id: str) -> None:
        """The run is known no longer: neither are its series."""
        for metric, labels in self._series.pop(run_id, ()):
            metric.remove(*labels)

    def keep(self, run_ids: Collection[str]) -> None:
        """Forget all other runs."""
        for run_id in set(self._series).difference(run_ids):
            self.forget(run_id)

    def _of(self, run: Run, metric: M, *labels: str) -> M:
        """The series of a run, to be removed with it."""
        values = (run.run_id, *labels)
        self._series.setdefault(run.run_id, set()).add((metric, values))
        return metric.labels(*values)

    def _count(self, run: Run, event: events.Happening) -> None:
        match event:
            case events.ModeChanged():
                self._show_mode(run)
            case events.LendDone():
                self._of(run, self._lends, event.kind.name.lower()).inc()
                self._of(run, self._lend_seconds).observe(event.cost_seconds)
            case events.ReclaimDone():
                self._of(run, self._reclaim_seconds).observe(event.cost_seconds)
            case events.MiniBatchEnded():
                self._of(run, self._waits).observe(event.wait_seconds)
            case events.DecisionMade():
                self._of(run, self._decisions, event.point.name.lower(), event.action.name.lower()).inc()
            case events.LendGoodput():
                self._account(run, event)
            case events.TransitionFailed():
                self._of(run, self._failures, event.transition.name.lower()).inc()

    def _account(self, run: Run, account: events.LendGoodput) -> None:
        self._of(run, self._accounts).inc()
        self._of(run, self._lent_tokens, "decoded").inc(account.decoded_tokens)
        self._of(run, self._lent_tokens, "delivered").inc(account.delivered_tokens)
        self._of(run, self._switch_seconds).inc(account.switch_seconds)
        self._of(run, self._lost_seconds).inc(account.lost_seconds)
        if account.gained_seconds is not None:
            self._of(run, self._gained).inc(account.gained_seconds)

    def _compare(self, run: Run, predicted_s: float, realised_s: float) -> None:
        self._of(run, self._predicted_waits).observe(predicted_s)
        self._of(run, self._realised_waits).observe(realised_s)
        self._of(run, self._wait_errors).observe(abs(predicted_s - realised_s))

    def _show_mode(self, run: Run) -> None:
        for mode in events.Mode:
            self._of(run, self._mode, mode.name.lower()).set(run.mode is mode)


class RunStates(LoopCollector):
    """How the runs stand now, computed when it is asked for."""

    def __init__(self, runs: Callable[[], Iterable[Run]], clock: Clock) -> None:
        super().__init__()
        self._runs = runs
        self._clock = clock

    def read(self) -> list[Metric]:
        opened = GaugeMetricFamily("turnout_run_open", "1 until the run is closed.", labels=["run_id"])
        step = GaugeMetricFamily("turnout_run_step", "The trainer's step.", labels=["run_id"])
        stuck = GaugeMetricFamily(
            "turnout_run_stuck", "1 while a transition failed and was not repeated yet.", labels=["run_id"]
        )
        lease = GaugeMetricFamily(
            "turnout_run_lease_seconds", "Domain seconds until the trainer counts as gone, 0 once.", labels=["run_id"]
        )
        for run in self._runs():
            opened.add_metric([run.run_id], run.is_open)
            step.add_metric([run.run_id], run.step)
            stuck.add_metric([run.run_id], bool(run.modes.stuck))
            lease.add_metric([run.run_id], run.lease.left_s(self._clock.now()))
        return [opened, step, stuck, lease]
