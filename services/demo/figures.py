"""The figures of one job, computed from its events alone.

Invariants: nothing is assumed: a group is lost unless it was trained on, was evicted, or is still in the buffer by its
own ledger, and duplicated for each time it was trained on beyond the first.

    wall_clock_s         job_ended.at - job_began.at, in domain seconds (the job's own clock)
    tokens_per_s         tokens trained on / wall_clock_s
    trainer_idle_share   share of the wall clock in trainer state "waiting"
    lends                lends decided by the policy: the one that starts every run and validation are left out
    reclaims             reclaims that ended one of those lends
    mean_staleness       mean over the trajectories trained on of (step - 1) - the newest weight version in them
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from services.demo.events import Event

DECIDED_LENDS: Final = ("step_end", "within_step")


class IncompleteJob(Exception):
    """The events are not those of a job from its beginning to its end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One column of the demo's table."""

    wall_clock_s: float
    tokens_per_s: float
    trainer_idle_share: float
    steps: int
    lends: int
    reclaims: int
    lost_groups: int
    duplicated_groups: int
    mean_staleness: float

    def to_dict(self) -> dict[str, Any]:
        """Return them by name."""
        return dataclasses.asdict(self)


def figures(events: Iterable[Event]) -> Figures:
    """Return the figures of a job; raises IncompleteJob."""
    known = list(events)
    began = _only(known, "job_began").at
    ended = _only(known, "job_ended").at
    trained = [event for event in known if event.name == "group_trained"]
    wall_clock = ended - began
    tokens = sum(sum(event["tokens"]) for event in trained)
    staleness = [value for event in trained for value in event["staleness"]]
    lends, reclaims = _round_trips(known)
    lost, duplicated = _account(known, trained)
    return Figures(
        wall_clock_s=round(wall_clock, 3),
        tokens_per_s=round(tokens / wall_clock, 3) if wall_clock else 0.0,
        trainer_idle_share=round(_time_in(known, "waiting", ended) / wall_clock, 6) if wall_clock else 0.0,
        steps=sum(event.name == "step_ended" for event in known),
        lends=lends,
        reclaims=reclaims,
        lost_groups=lost,
        duplicated_groups=duplicated,
        mean_staleness=round(sum(staleness) / len(staleness), 6) if staleness else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Delivered:
    """What was trained on under one prompt."""

    tokens: tuple[int, ...]
    """Length of each trajectory."""

    digest: str
    """Of all their bytes."""


def delivered(events: Iterable[Event]) -> dict[str, Delivered]:
    """Return what was trained on, by group. Two modes of a seed must have delivered the same."""
    return {
        event["group_id"]: Delivered(tuple(event["tokens"]), event["digest"])
        for event in events
        if event.name == "group_trained"
    }


def gain(off: Figures, on: Figures) -> float:
    """Return the share of the wall clock that switching saved; negative if it cost time."""
    return 1.0 - on.wall_clock_s / off.wall_clock_s if off.wall_clock_s else 0.0


def _only(events: list[Event], name: str) -> Event:
    found = [event for event in events if event.name == name]
    if len(found) != 1:
        raise IncompleteJob(f"expected one {name} event, found {len(found)}")
    return found[0]


def _time_in(events: list[Event], state: str, end: float) -> float:
    changes = [(event.at, event["state"]) for event in events if event.name == "trainer"]
    until = [at for at, _ in changes[1:]] + [end]
    return sum(stop - start for (start, now), stop in zip(changes, until, strict=True) if now == state)


def _round_trips(events: list[Event]) -> tuple[int, int]:
    lends = reclaims = 0
    decided = False
    for event in events:
        if event.name == "lend":
            decided = event["kind"] in DECIDED_LENDS
            lends += decided
        elif event.name == "reclaim":
            reclaims += decided
            decided = False
    return lends, reclaims


def _account(events: list[Event], trained: list[Event]) -> tuple[int, int]:
    added = {event["group_id"] for event in events if event.name == "group_added"}
    evicted = {event["group_id"] for event in events if event.name == "group_left" and event["how"] == "evicted"}
    times = Counter(event["group_id"] for event in trained)
    ledger = _only(events, "ledger")
    unaccounted = len(added - evicted - set(times)) - ledger["present"]
    # The buffer's own books must say the same as what the trainer saw.
    out_of_balance = ledger["added"] - ledger["committed"] - ledger["evicted"] - ledger["present"]
    not_committed = len(times) - ledger["committed"]
    lost = max(unaccounted, out_of_balance, not_committed, 0)
    duplicated = sum(number - 1 for number in times.values()) + len(set(times) - added)
    return lost, duplicated
