"""EventRing: what happened to the groups of a run, in order, as far back as memory allows.

Invariants: sequence numbers rise by one from 1; the newest `capacity` events are kept, and asking for a trimmed one is
an error that names the first kept. Progress is told as it happens, under number 0, and never kept.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from services.buffer.domain.evictions import EvictionReason
from services.runtime.errors import out_of_range
from services.runtime.history import History, Packing

# About a dozen steps of a 512-group job, so that a scheduler that restarts finds what it missed. Packed they take a
# megabyte or two, and the newest as objects half a megabyte more.
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


_KINDS: Final = {kind.value: kind for kind in GroupEventKind}
_REASONS: Final = {reason.value: reason for reason in EvictionReason}


def _pack(events: Sequence[GroupEvent]) -> bytes:
    # By field: neighbours share most of theirs, so that little is left of them.
    fields = zip(*map(_fields, events), strict=True)
    return zlib.compress(json.dumps(list(fields), separators=(",", ":")).encode(), level=1)


def _fields(event: GroupEvent) -> tuple[object, ...]:
    return (
        event.sequence,
        event.wall,
        event.kind.value,
        event.partition,
        event.group_id,
        event.born,
        event.trajectories,
        event.index,
        event.lengths,
        event.replica_id,
        [reason.value for reason in event.reasons],
        event.attempt,
    )


def _event(row: Sequence[Any]) -> GroupEvent:
    sequence, wall, kind, partition, group_id, born, trajectories, index, lengths, replica_id, reasons, attempt = row
    return GroupEvent(
        sequence,
        wall,
        _KINDS[kind],
        partition,
        group_id,
        born,
        trajectories,
        index,
        tuple(lengths),
        replica_id,
        tuple([_REASONS[reason] for reason in reasons]),
        attempt,
    )


def _unpack(packed: bytes) -> list[GroupEvent]:
    return list(map(_event, zip(*json.loads(zlib.decompress(packed)), strict=True)))


_PACKING: Final = Packing(_pack, _unpack)


class EventRing:
    """The newest events of a run; an event's position in the history is its sequence number."""

    __slots__ = ("_capacity", "_history")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._history = History(_PACKING, 1)

    @property
    def next_sequence(self) -> int:
        """Number of the next event."""
        return self._history.end

    @property
    def first_kept(self) -> int:
        """Sequence number of the oldest kept event, or of the next one if none is kept."""
        return self._history.first

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
        self._keep(event)

    def _keep(self, event: GroupEvent) -> None:
        self._history.append(event)
        self._history.trim(self._history.end - self._capacity)

    def kept(self) -> Iterator[GroupEvent]:
        """The kept events of now in order, however the run goes on."""
        return self._history.snapshot()

    def restart(self, next_sequence: int) -> None:
        """Begin empty, with this number for the next event."""
        self._history = History(_PACKING, next_sequence)

    def restore(self, events: Iterable[GroupEvent]) -> None:
        """Take events that `kept` gave, the oldest first, under their own numbers, which end with the last one's."""
        for event in events:
            if event.sequence != self._history.end:
                self.restart(event.sequence)
            self._keep(event)

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
        return self._history.read(sequence, limit)
