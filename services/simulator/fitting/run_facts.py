"""What a run of Turnout's own tells of itself, gathered from its events.

Invariants: events are taken in order, each once; a window in which weights or GPUs moved teaches nothing about
decoding; times are seconds of the run's clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from services.views.run_state import lent_seconds
from turnout.scheduler.v1 import events_pb2

# Shorter windows count too few tokens to say anything, in longer ones the running requests change too much.
_SHORTEST_S, _LONGEST_S = 5.0, 60.0


@dataclass(frozen=True, slots=True)
class Window:
    """Between two readings of a replica: requests running (mean), and seconds that each token of one of them took."""

    running: float
    token_s: float
    tokens: int


@dataclass(slots=True)
class RunFacts:
    """lengths: tokens by group and trajectory. mini_batches: seconds of training each. steps: (wait, whole) of each
    step, in seconds. hybrids, standalones: the most replicas seen together."""

    config: dict[str, Any] = field(default_factory=dict)
    lengths: list[tuple[int, ...]] = field(default_factory=list)
    mini_batches: list[float] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    lends: list[float] = field(default_factory=list)
    reclaims: list[float] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    prefilled: int = 0
    prefill_s: float = 0.0
    hybrids: int = 0
    standalones: int = 0
    _sequence: int = 0
    _began: float | None = None
    _waited: float = 0.0
    _lent: bool = False
    _training_since: float | None = None
    _readings: dict[str, tuple[float, events_pb2.ReplicaReading]] = field(default_factory=dict)
    _counted: dict[str, tuple[int, float]] = field(default_factory=dict)

    def take(self, event: events_pb2.RunEvent) -> None:
        """Take in one event; one that was taken before changes nothing."""
        if event.sequence <= self._sequence:
            return
        self._sequence = event.sequence
        name = event.WhichOneof("event")
        if name is not None and (handler := _HANDLERS.get(name)) is not None:
            handler(self, event)

    def _run_opened(self, event: events_pb2.RunEvent) -> None:
        self.config = json.loads(event.run_opened.config_json)

    def _run_updated(self, event: events_pb2.RunEvent) -> None:
        self.config = json.loads(event.run_updated.config_json)

    def _group_finished(self, event: events_pb2.RunEvent) -> None:
        if event.group_finished.lengths:
            self.lengths.append(tuple(event.group_finished.lengths))

    def _step_began(self, event: events_pb2.RunEvent) -> None:
        self._began, self._waited = event.at, 0.0

    def _mini_batch_began(self, event: events_pb2.RunEvent) -> None:
        self._trained(event.at)

    def _mini_batch_ended(self, event: events_pb2.RunEvent) -> None:
        self._waited += event.mini_batch_ended.wait_seconds
        self._training_since = event.at

    def _step_ended(self, event: events_pb2.RunEvent) -> None:
        self._trained(event.at)
        if self._began is not None:
            self.steps.append((self._waited, event.at - self._began))
        self._began = None

    def _trained(self, at: float) -> None:
        if self._training_since is not None:
            self.mini_batches.append(at - self._training_since)
        self._training_since = None

    def _lend_done(self, event: events_pb2.RunEvent) -> None:
        if event.lend_done.kind != events_pb2.LEND_KIND_VALIDATION:
            self.lends.append(event.lend_done.cost_seconds)
        self._lent = True
        self._readings.clear()

    def _reclaim_done(self, event: events_pb2.RunEvent) -> None:
        self.reclaims.append(event.reclaim_done.cost_seconds)
        if self._began is not None and self._lent:
            self._waited += lent_seconds(event, self._began)
        self._lent = False
        self._readings.clear()

    def _sync_done(self, event: events_pb2.RunEvent) -> None:
        if not event.sync_done.hybrid:
            self.syncs.append(event.sync_done.seconds)
        self._readings.clear()

    def _mode_changed(self, event: events_pb2.RunEvent) -> None:
        self._readings.clear()

    def _replica_counters(self, event: events_pb2.RunEvent) -> None:
        readings = event.replica_counters.replicas
        self.hybrids = max(self.hybrids, sum(reading.hybrid for reading in readings))
        self.standalones = max(
            self.standalones, sum(reading.HasField("hybrid") and not reading.hybrid for reading in readings)
        )
        for reading in readings:
            self._prefilled(reading)
            before = self._readings.get(reading.replica_id)
            if before is not None and event.at - before[0] < _SHORTEST_S:
                continue
            self._readings[reading.replica_id] = (event.at, reading)
            if before is not None:
                self._window(event.at - before[0], before[1], reading)

    def _prefilled(self, reading: events_pb2.ReplicaReading) -> None:
        """Count what was prefilled since the last reading, whatever moved in between; an engine that restarted not."""
        tokens, seconds = self._counted.get(reading.replica_id, (0, 0.0))
        if reading.prefilled_tokens >= tokens and reading.prefill_seconds >= seconds:
            self.prefilled += reading.prefilled_tokens - tokens
            self.prefill_s += reading.prefill_seconds - seconds
        self._counted[reading.replica_id] = (reading.prefilled_tokens, reading.prefill_seconds)

    def _window(self, took_s: float, before: events_pb2.ReplicaReading, now: events_pb2.ReplicaReading) -> None:
        tokens = now.decoded_tokens - before.decoded_tokens
        prefill_s = now.prefill_seconds - before.prefill_seconds
        if tokens <= 0 or prefill_s < 0 or took_s > _LONGEST_S:
            return
        running = (before.running + now.running) / 2
        decoding_s = took_s - prefill_s
        # Requests come and go within a window that saw a few of them; the mean is then no good.
        if running >= 1 and decoding_s > took_s / 2 and abs(now.running - before.running) <= max(0.25 * running, 2):
            self.windows.append(Window(running, decoding_s * running / tokens, tokens))


_Handler = Callable[[RunFacts, events_pb2.RunEvent], None]
_HANDLERS: Final[dict[str, _Handler]] = {
    "run_opened": RunFacts._run_opened,
    "run_updated": RunFacts._run_updated,
    "group_finished": RunFacts._group_finished,
    "step_began": RunFacts._step_began,
    "mini_batch_began": RunFacts._mini_batch_began,
    "mini_batch_ended": RunFacts._mini_batch_ended,
    "step_ended": RunFacts._step_ended,
    "lend_done": RunFacts._lend_done,
    "reclaim_done": RunFacts._reclaim_done,
    "sync_done": RunFacts._sync_done,
    "mode_changed": RunFacts._mode_changed,
    "replica_counters": RunFacts._replica_counters,
}


def facts_of(events: Iterable[events_pb2.RunEvent]) -> RunFacts:
    """The facts that a run's events tell."""
    facts = RunFacts()
    for event in events:
        facts.take(event)
    return facts
