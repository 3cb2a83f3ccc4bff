"""RunState: what all partitions of a run share.

Invariants: `step` is the highest step of a call that carried the then current epoch and never falls; `groups` counts
the groups present in all partitions.
"""

from dataclasses import dataclass, field
from typing import Protocol

from services.buffer.domain.claims import ClaimBook
from services.buffer.domain.config import RunConfig
from services.buffer.domain.events import EventRing
from services.buffer.domain.group import Group
from services.buffer.domain.ids import Ids
from services.buffer.domain.leases import LeaseBook
from services.buffer.domain.payloads import PayloadBook


class GroupWatcher(Protocol):
    """Somebody who reads the groups little by little and must see each as it is now."""

    def before_change(self, partition: str, group: Group) -> None:
        """The group of that partition is about to change."""


@dataclass(slots=True, eq=False)
class RunState:
    """Shared state; `contact_at` is the domain time of the trainer's last call."""

    config: RunConfig
    ids: Ids
    payloads: PayloadBook
    epoch: int = 0
    step: int = 0
    contact_at: float = 0.0
    groups: int = 0
    sequence: int = 0
    events: EventRing = field(default_factory=EventRing)
    claims: ClaimBook = field(default_factory=ClaimBook)
    leases: LeaseBook = field(default_factory=LeaseBook)
    watchers: tuple[GroupWatcher, ...] = ()

    def touch(self, partition: str, group: Group) -> None:
        """Every change of a group of that partition is announced here before it is made."""
        for watcher in self.watchers:
            watcher.before_change(partition, group)
