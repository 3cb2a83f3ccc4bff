"""Who did what when, as rows of coloured stretches; pure, made from the events of a job.

Invariants: the stretches of a row do not overlap and cover the job from the row's first event to the end; stretches of
no length are left out; rows are in the order standalone, hybrid, trainer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class TimedEvent(Protocol):
    """What a timeline is made of."""

    @property
    def at(self) -> float:
        """Seconds since the job began."""

    @property
    def name(self) -> str:
        """What happened."""

    def __getitem__(self, key: str) -> Any:
        """Return one of its values."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in one state."""

    start: float
    end: float
    state: str


@dataclass(frozen=True, slots=True)
class Row:
    """One replica, or the trainer."""

    label: str
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment at which the GPUs changed hands."""

    at: float
    kind: str
    """`lend` or `reclaim`."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One job."""

    rows: tuple[Row, ...]
    marks: tuple[Mark, ...]
    end: float


def timeline(events: Iterable[TimedEvent]) -> Timeline:
    """Return the timeline of a job's events."""
    roles: dict[str, str] = {}
    changes: dict[str, list[tuple[float, str]]] = {}
    marks: list[Mark] = []
    end = 0.0
    for event in events:
        end = max(end, event.at)
        if event.name == "job_began":
            roles = {replica["replica_id"]: replica["role"] for replica in event["replicas"]}
        elif event.name == "replica":
            changes.setdefault(event["replica_id"], []).append((event.at, event["state"]))
        elif event.name == "trainer":
            changes.setdefault("trainer", []).append((event.at, event["state"]))
        elif event.name in ("lend", "reclaim"):
            marks.append(Mark(event.at, event.name))
    order = sorted(roles, key=lambda replica_id: (roles[replica_id] != "standalone", replica_id))
    rows = tuple(Row(name, _stretches(changes.get(name, []), end)) for name in (*order, "trainer"))
    return Timeline(rows, tuple(marks), end)


def _stretches(changes: list[tuple[float, str]], end: float) -> tuple[Stretch, ...]:
    made: list[Stretch] = []
    for number, (start, state) in enumerate(changes):
        stop = changes[number + 1][0] if number + 1 < len(changes) else end
        if stop <= start:
            continue
        if made and made[-1].state == state and made[-1].end == start:
            made[-1] = Stretch(made[-1].start, stop, state)
        else:
            made.append(Stretch(start, stop, state))
    return tuple(made)
