"""EventRing: what happened to the groups of a run, in order, as far back as memory allows.

Invariants: sequence numbers rise by one from 1; the newest `capacity` events are kept, and asking for a trimmed one is
an error that names the first kept. Progress is told as it happens, under number 0, and never kept.
"""

from dataclasses import dataclass
from enum import Enum

from services.buffer.domain.evictions import EvictionReason
from services.runtime.errors import out_of_range

# About a hundred steps of a 512-group job, so that a scheduler that restarts finds what it missed; some 20 MB at worst.
CAPACITY = 65_536


class GroupEventKind(Enum):
    """What happened; the numbers are those of the wire."""

    ADDED = 1
    STARTED = 2
    TRAJECTORY_FINISHED = 3
    FINISHED = 4
    FAILED = 5
    SAMPLED = 6
    RETURNED = 7
    COMMITTED = 8
    EVICTED = 9
    REISSUED = 10
    PROGRESS = 11
    RESTORED = 12


@dataclass(slots=True)
class GroupEvent:
    """One thing that happened to one group; `wall` in unix seconds. Not frozen, for the reason given in `outputs`."""

    sequence: int
    wall: float
    kind: GroupEventKind
    partition: str
    group_id: str
    born: int
    trajectories: int = 0
    index: int | None = None
    lengths: tuple[int, ...] = ()
    replica_id: str = ""
    reasons: tuple[EvictionReason, ...] = ()
    attempt: int = 0
    done: int | None = None
    engine_request_id: str = ""


class EventRing:
    """The newest events of a run."""

    __slots__ = ("_capacity", "_events", "next_sequence")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        # Position sequence % capacity, so that any event is found at once.
        self._events: list[GroupEvent] = []
        self.next_sequence = 1

    @property
    def first_kept(self) -> int:
        """Sequence number of the oldest kept event, or of the next one if none is kept."""
        return self.next_sequence - len(self._events)

    def append(
        self,
        kind: GroupEventKind,
        partition: str,
        group_id: str,
        born: int,
        wall: float,
        *,
        trajectories: int = 0,
        index: int | None = None,
        lengths: tuple[int, ...] = (),
        replica_id: str = "",
        reasons: tuple[EvictionReason, ...] = (),
        attempt: int = 0,
    ) -> None:
        """Add an event under the next number."""
        event = GroupEvent(
            self.next_sequence,
            wall,
            kind,
            partition,
            group_id,
            born,
            trajectories,
            index,
            lengths,
            replica_id,
            reasons,
            attempt,
        )
        if len(self._events) < self._capacity:
            self._events.append(event)
        else:
            self._events[(event.sequence - 1) % self._capacity] = event
        self.next_sequence += 1

    def kept(self) -> list[GroupEvent]:
        """The kept events in order."""
        turn = (self.next_sequence - 1) % self._capacity if len(self._events) == self._capacity else 0
        return [*self._events[turn:], *self._events[:turn]]

    def restore(self, events: list[GroupEvent]) -> None:
        """Take the events that `kept` gave, under their own numbers: from the first on, or as many as fit."""
        self._events = list(events)
        if len(events) == self._capacity:
            for event in events:
                self._events[(event.sequence - 1) % self._capacity] = event

    def read(self, sequence: int, limit: int) -> list[GroupEvent]:
        """Up to `limit` events from `sequence` on, empty if it is not there yet.

        Raises OUT_OF_RANGE / EVENTS_TRIMMED if it is no longer kept.
        """
        if sequence < self.first_kept:
            raise out_of_range(
                "EVENTS_TRIMMED",
                f"events before {self.first_kept} are no longer kept",
                field="from_sequence",
                value=sequence,
                first_kept=self.first_kept,
            )
        end = min(self.next_sequence, sequence + limit)
        return [self._events[(number - 1) % self._capacity] for number in range(sequence, end)]
