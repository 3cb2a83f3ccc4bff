"""What a service sees of its journal.

Use: decide and apply in memory, `append` what happened, and let the answer and every wake-up leave once the returned
`Durable` is done. After a restart: read the snapshot, if there is one, then `replay`, then serve.

Invariants: all methods are called on one event loop. Records become durable in the order of `append`, whatever their
stream. Positions start at 1 and rise by one with each record. After a failure nothing is accepted until `reopen`: the
owner answers NOT_SERVING, drops its memory, reopens and loads again, since memory holds changes that are not stored.
After a *fatal* failure (an fsync failed) the process must exit: see `failures`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Protocol

from services.runtime.durations import Durations
from services.runtime.journal.batch import Record
from services.runtime.journal.durable import Durable
from services.runtime.journal.failures import JournalFailure

COMMIT_BOUNDS_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
"""From a copy into memory of the kernel to a disk that hangs."""


class JournalState(Enum):
    """Whether records are accepted."""

    OPEN = auto()
    FAILED = auto()
    """Until `reopen`."""
    FATAL = auto()
    """For good: the process must exit."""
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class JournalStats:
    """Figures for metrics. Counters start at 0 with each opening; sizes are in bytes."""

    records: int = 0
    """Records that became durable."""
    commits: int = 0
    """Commits that stored them; records / commits is the size of a group."""
    pending_records: int = 0
    """Records handed in that are not durable yet."""
    log_bytes: int = 0
    """Batches since the last snapshot, and those whose deletion is still to come."""
    wal_bytes: int = 0
    """About how much of the WAL is in use."""
    committed_bytes: int = 0
    """Bytes of the records that became durable, with what surrounds them in a batch."""
    commit_times: Durations = field(default_factory=lambda: Durations(COMMIT_BOUNDS_S))
    """Wall seconds of each commit."""


class Journal(Protocol):
    """An ordered, durable log of records with a snapshot at its beginning."""

    @property
    def id(self) -> str:
        """Random, given when the journal was made."""
        ...

    @property
    def incarnation(self) -> int:
        """How many times the journal was opened, this time included; stored before anything is served."""
        ...

    @property
    def state(self) -> JournalState:
        """Whether records are accepted."""
        ...

    @property
    def failure(self) -> JournalFailure | None:
        """Why they are not; None while they are, or when closed in order."""
        ...

    @property
    def position(self) -> int:
        """Position of the last record handed in; 0 = none."""
        ...

    @property
    def durable_position(self) -> int:
        """Position of the last durable record; 0 = none."""
        ...

    @property
    def snapshot_position(self) -> int:
        """The last record that the snapshot stands for; 0 = there is no snapshot."""
        ...

    @property
    def compaction_due(self) -> bool:
        """Whether the log has grown so long that a snapshot is worth its cost."""
        ...

    @property
    def short_of_space(self) -> bool:
        """Whether the ballast was given back. Admit nothing that needs space, but go on committing and deleting."""
        ...

    @property
    def lost(self) -> int:
        """Acknowledged records that a restart of the machine cost (durability `os` alone), found at this opening."""
        ...

    @property
    def stats(self) -> JournalStats:
        """Figures for metrics."""
        ...

    def append(self, stream: str, payload: bytes) -> Durable:
        """Hand in a record of at most 256 MiB. Cheap, never blocks; the position is `Durable.position`.

        `stream` is an id (1 to 512 bytes of UTF-8) by which `replay` can choose; it costs its length per record.
        Records handed in without returning to the event loop in between are committed all or none (as long as they are
        below 512 MiB together), so a change of several records is never half there after a crash.
        Raises what `failure` holds when nothing is accepted.
        """
        ...

    def tail(self) -> Durable:
        """Return the promise for everything handed in so far: what a reader of memory awaits before it answers."""
        ...

    def replay(self, after: int | None = None, streams: Collection[str] | None = None) -> AsyncIterator[Record]:
        """Yield the durable records after position `after` in order, up to the last one when it begins.

        Without `after` it begins behind the snapshot. `streams` chooses; None = all. May run while serving, any number
        at a time, for however long: no lock is held between two records.
        Raises OUT_OF_RANGE / JOURNAL_COMPACTED if a snapshot took the records' place, DATA_LOSS / JOURNAL_DAMAGED with
        `last_good_position`, ABORTED / JOURNAL_REOPENED.
        """
        ...

    def read_snapshot(self) -> AsyncIterator[bytes]:
        """Yield the chunks of the snapshot as they were handed in; nothing if there is none. Raises DATA_LOSS."""
        ...

    async def snapshot(self, position: int, chunks: AsyncIterable[bytes]) -> None:
        """Store `chunks` (each at most 64 MiB) in place of all records up to `position`, then delete those.

        `chunks` may be made little by little while records are appended, and may already hold effects of records after
        `position` (the owner then has to apply those twice without harm): the snapshot takes effect only once every
        record handed in before its last chunk was taken is durable. Written off the loop. Returns when the old records
        are deleted; a crash or a cancellation before it took effect leaves the former state, one after that loses
        nothing. Raises OUT_OF_RANGE / SNAPSHOT_POSITION unless snapshot_position < position <= the last record,
        FAILED_PRECONDITION / SNAPSHOT_RUNNING, RESOURCE_EXHAUSTED / DISK_FULL (the journal goes on), or what `failure`
        holds.
        """
        ...

    async def failed(self) -> JournalFailure:
        """Wait until records are no longer accepted, and return why. If closed in order: JOURNAL_CLOSED."""
        ...

    async def reopen(self) -> None:
        """Verify and open the files anew after a failure, as at the start. The owner loads again afterwards.

        Raises FAILED_PRECONDITION / JOURNAL_NOT_FAILED unless the state is FAILED, and all that opening raises.
        """
        ...

    async def give_back_ballast(self) -> bool:
        """Free the reserved space, for an owner that meets a full disk first; return whether there was any."""
        ...

    async def take_ballast(self) -> bool:
        """Reserve the space again if the disk has room for twice as much; return whether it is held."""
        ...

    async def close(self) -> None:
        """Make everything handed in durable, and close the files. Later calls of `append` raise JOURNAL_CLOSED."""
        ...
