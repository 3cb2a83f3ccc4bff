"""The events of a demo job, as `--events` writes them: one JSON object per line.

Every line has `seed`, `mode` ("off" or "on"), `at` (domain seconds since the job began) and `event`:

    job_began            steps, batch_size, mini_batch_size, group_size, policy, time_scale,
                         replicas [{replica_id, role}]
    group_added          group_id, prompt_id, step, trajectories
    trajectory_finished  group_id, index, tokens, replica_id
    group_finished       group_id, tokens [per trajectory], on_hybrid
    group_left           group_id, how ("sampled", "committed", "evicted", ...), reasons
    group_trained        group_id, step, mini_batch, tokens [per trajectory], staleness [per trajectory],
                         digest (CRC32C over the bytes of all its trajectories)
    replica              replica_id, state ("decoding", "idle", "asleep", "updating"): from now on
    trainer              state ("training", "waiting", "updating"), step: from now on
    step_began, step_ended            step
    mode                 from, to
    decision             point, step, action, policy, reason, numbers
    lend                 lend_id, kind ("init", "step_end", "within_step", "validation"), cost_s: it serves now
    reclaim              cost_s: the trainer has its GPUs now
    weights_synced       hybrid, seconds, version
    ledger               added, committed, evicted, present: the buffer's own account at the end
    job_ended            real_seconds

Invariants: lines of a job are in order of `at`; a group trained on twice has two `group_trained` lines; every figure of
the demo's table is computed from these lines and from nothing else (services.demo.figures).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Event:
    """One line."""

    at: float
    """Domain seconds since the job began."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """Return one of the values."""
        return self.values[key]

    def to_line(self, seed: int, mode: str) -> str:
        """Return the line, without its end."""
        head = {"seed": seed, "mode": mode, "at": round(self.at, 3), "event": self.name}
        return json.dumps(head | dict(self.values), ensure_ascii=False)

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return the event of a line; its seed and mode are left to the caller."""
        values = json.loads(line)
        for key in ("seed", "mode"):
            values.pop(key, None)
        return cls(values.pop("at"), values.pop("event"), values)


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return events by time; what happened at one instant stays in the order in which it was seen."""
    return sorted(events, key=lambda event: event.at)


def read_events(path: Path) -> Iterator[tuple[int, str, Event]]:
    """Yield seed, mode and event of every line of a file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            head = json.loads(line)
            yield head["seed"], head["mode"], Event.from_line(line)
