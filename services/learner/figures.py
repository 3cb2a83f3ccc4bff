"""The figures of one job, computed from its events alone.

Invariants: nothing is assumed: a group is lost unless it was trained on, was evicted or is still in the buffer by its
own ledger; a sync is equal only if some replica took the version and each that did computes what the trainer computes.

    worker_rss_awake     median over the readings of the hybrid replica's worker awake, after its first sleep
    worker_rss_asleep    the same while it was asleep
    storage_bytes_freed  how much less was behind its weights and KV blocks asleep than awake, by the same readings
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from services.demo.events import Event
from services.learner.job import HYBRID, Job
from services.learner.task import REWARD_RANGE

GOAL: Final = 0.2
"""Of the reward's range, by which the last quarter of the steps has to be better than the first."""

FREED_SHARE: Final = 0.8
"""Of the freed storages, by which the worker's memory has to fall."""


class IncompleteJob(Exception):
    """The events are not those of a job from its beginning to its end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One seed."""

    seed: int
    rewards: list[float]
    """Mean reward of each step's answers."""

    reward_range: tuple[float, float]
    steps: int
    lends: int
    syncs: int
    syncs_with_equal_output: int
    lost_groups: int
    worker_rss_awake: int
    worker_rss_asleep: int
    storage_bytes_freed: int

    @property
    def gain(self) -> float:
        """How much better the last quarter of the steps is than the first, as a share of the reward's range."""
        quarter = max(len(self.rewards) // 4, 1)
        low, high = self.reward_range
        return (statistics.fmean(self.rewards[-quarter:]) - statistics.fmean(self.rewards[:quarter])) / (high - low)

    @property
    def freed_share(self) -> float:
        """How much the worker's memory falls, as a share of the storages that were freed; 0 if none were."""
        freed = self.storage_bytes_freed
        return (self.worker_rss_awake - self.worker_rss_asleep) / freed if freed > 0 else 0.0

    def faults(self) -> list[str]:
        """Return what is not as it has to be, one sentence each."""
        found = []
        if self.gain < GOAL:
            found.append(f"seed {self.seed}: the reward rose by {self.gain:.3f} of its range, not by {GOAL}")
        if self.syncs_with_equal_output != self.syncs:
            unequal = self.syncs - self.syncs_with_equal_output
            found.append(f"seed {self.seed}: after {unequal} of {self.syncs} syncs an engine computed something else")
        if self.lost_groups:
            found.append(f"seed {self.seed}: {self.lost_groups} groups were lost")
        if self.freed_share < FREED_SHARE:
            found.append(
                f"seed {self.seed}: the worker's memory fell by {self.freed_share:.2f} of what was freed, "
                f"not by {FREED_SHARE}"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return it as `--json` has it."""
        return dataclasses.asdict(self)


def figures(job: Job, events: Iterable[Event]) -> Figures:
    """Return the figures of a job; raises IncompleteJob."""
    known = list(events)
    ledger = _only(known, "ledger")
    added = {event["group_id"] for event in known if event.name == "group_added"}
    trained = {event["group_id"] for event in known if event.name == "group_trained"}
    syncs = [event for event in known if event.name == "synced"]
    awake, asleep = _memory(known, "awake"), _memory(known, "asleep")
    return Figures(
        seed=job.seed,
        rewards=[event["reward"] for event in known if event.name == "learned"],
        reward_range=REWARD_RANGE,
        steps=sum(event.name == "step_ended" for event in known),
        lends=sum(event.name == "lend" for event in known),
        syncs=len(syncs),
        syncs_with_equal_output=sum(bool(event["replicas"]) and not event["differing"] for event in syncs),
        lost_groups=max(
            len(added - trained) - ledger["evicted"] - ledger["present"],
            ledger["added"] - ledger["committed"] - ledger["evicted"] - ledger["present"],
            len(trained) - ledger["committed"],
            0,
        ),
        worker_rss_awake=awake.held,
        worker_rss_asleep=asleep.held,
        storage_bytes_freed=awake.storages - asleep.storages,
    )


@dataclass(frozen=True, slots=True)
class _Memory:
    held: int
    storages: int


def _memory(events: list[Event], state: str) -> _Memory:
    """The medians of the hybrid replica's readings in a state, from its first sleep on."""
    readings = [event for event in events if event.name == "memory" and event["replica_id"] == HYBRID]
    first = next((number for number, event in enumerate(readings) if event["state"] == "asleep"), len(readings))
    found = [event for event in readings[first:] if event["state"] == state]
    if not found:
        raise IncompleteJob(f"the hybrid replica was never seen {state} after it slept")
    return _Memory(*(int(statistics.median(event[name] for event in found)) for name in ("bytes", "storages")))


def _only(events: list[Event], name: str) -> Event:
    found = [event for event in events if event.name == name]
    if len(found) != 1:
        raise IncompleteJob(f"expected one {name} event, found {len(found)}")
    return found[0]
