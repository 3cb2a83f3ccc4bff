"""What the trainer and every replica did when, as stretches of one state; pure.

Invariants: the stretches of a lane follow each other without overlap; a hybrid replica is asleep whenever the trainer
has its GPUs, whatever an older reading said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.views.run_state import mode_name
from services.views.timeline import Row, Stretch
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2

TRAINER: Final = "trainer"


@dataclass(slots=True)
class _Lane:
    stretches: list[Stretch] = field(default_factory=list)
    state: str | None = None
    since: float = 0.0

    def set(self, at: float, state: str | None) -> None:
        """From `at` on it is in `state`; None: not there."""
        if state == self.state:
            return
        self.close(at)
        self.state, self.since = state, at

    def close(self, at: float) -> None:
        if self.state is not None and at > self.since:
            self.stretches.append(Stretch(self.since, at, self.state))
            self.since = at

    def until(self, at: float) -> tuple[Stretch, ...]:
        """All stretches, the present one until `at`."""
        if self.state is None or at <= self.since:
            return tuple(self.stretches)
        return (*self.stretches, Stretch(self.since, at, self.state))


class Lanes:
    """Feed it every event, in order."""

    def __init__(self) -> None:
        self._trainer = _Lane()
        self._replicas: dict[str, _Lane] = {}
        self._hybrid: dict[str, bool] = {}
        self._mode = "unknown"
        self._at = 0.0

    def rows(self) -> tuple[Row, ...]:
        """Standalone replicas, hybrid ones, the trainer."""
        order = sorted(self._replicas, key=lambda name: (self._hybrid[name], name))
        rows = [Row(name, self._replicas[name].until(self._at)) for name in order]
        return (*rows, Row(TRAINER, self._trainer.until(self._at)))

    def fold(self, event: events_pb2.RunEvent) -> None:
        """Take in one event."""
        self._at = max(self._at, event.at)
        match event.WhichOneof("event"):
            case "step_began":
                self._trainer.set(event.at, "waiting")
            case "mini_batch_began":
                self._trainer.set(event.at, "waiting")
            case "mini_batch_ended":
                self._trainer.set(event.at, "training")
            case "step_ended":
                self._trainer.set(event.at, "updating")
            case "run_closed":
                self._trainer.set(event.at, None)
            case "mode_changed":
                self._mode_changed(event.at, mode_name(event.mode_changed.to))
            case "replica_counters":
                self._read(event.at, event.replica_counters)
            case _:
                return

    def _mode_changed(self, at: float, mode: str) -> None:
        self._mode = mode
        state = {"TRAINER": "asleep", "LENDING": "updating", "RECLAIMING": "updating"}.get(mode)
        if state is not None:
            for name, lane in self._replicas.items():
                if self._hybrid[name]:
                    lane.set(at, state)

    def _read(self, at: float, counters: events_pb2.ReplicaCounters) -> None:
        seen: set[str] = set()
        for reading in counters.replicas:
            seen.add(reading.replica_id)
            self._hybrid[reading.replica_id] = reading.hybrid
            self._replicas.setdefault(reading.replica_id, _Lane()).set(at, self._state(reading))
        for name, lane in self._replicas.items():
            # On its way to or from the trainer a replica may not answer in time.
            if name not in seen and not (self._hybrid[name] and self._mode != "ROLLOUT"):
                lane.set(at, None)

    def _state(self, reading: events_pb2.ReplicaReading) -> str:
        if reading.hybrid and self._mode == "TRAINER":
            return "asleep"
        if reading.hybrid and self._mode in ("LENDING", "RECLAIMING"):
            return "updating"
        if reading.route == engine_pb2.ROUTE_STATE_HELD:
            return "updating"
        return "decoding" if reading.running else "idle"
