"""Audit: the ledger of every partition, read from a data directory that no service has open.

Invariant: it reads what a start of the service would read, and verifies what that would verify.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.buffer.domain.dropped import DroppedPrompt
from services.buffer.domain.ledger import Ledger
from services.buffer.domain.payloads import MemoryPayloadStore
from services.buffer.storage.loading import load
from services.buffer.storage.schema import SCHEMA
from services.runtime.errors import not_found
from services.runtime.journal import JournalOptions, open_journal
from services.runtime.journal.failures import failure_of
from services.runtime.journal.files import JournalFiles
from services.runtime.journal.lock import DirectoryLock
from services.runtime.journal.mark import read_mark

# A page on a terminal; GetLedger lists them all.
MOST_DROPPED = 20


@dataclass(frozen=True, slots=True)
class PartitionAudit:
    """One partition; `step` and `epoch` are those of its run, `dropped` the prompts dropped most."""

    run_id: str
    partition: str
    epoch: int
    step: int
    ledger: Ledger
    dropped: list[DroppedPrompt]


@dataclass(frozen=True, slots=True)
class Audit:
    """All partitions, after `position` records."""

    position: int
    lost: int
    partitions: list[PartitionAudit]

    @property
    def balanced(self) -> bool:
        """Whether every group is accounted for."""
        return all(found.ledger.balanced for found in self.partitions)


async def audit(data_dir: Path) -> Audit:
    """Read a data directory. Raises NOT_FOUND, DATA_LOSS, FAILED_PRECONDITION / JOURNAL_LOCKED if it is in use."""
    directory = data_dir / "journal"
    files = JournalFiles(directory)
    if not files.begun():
        raise not_found("JOURNAL_NOT_FOUND", f"{data_dir} holds no journal of a replay buffer")
    # What the mark promises stays as it is: after an audit of `fsync` as `os`, a later loss would pass as power loss.
    try:
        lock = DirectoryLock(files.lock)  # A service that writes the mark may be in the middle of it.
        try:
            acknowledged = read_mark(files.mark)
        finally:
            lock.release()
    except OSError as error:
        raise failure_of(error).error from error
    options = JournalOptions() if acknowledged is None else JournalOptions(durability=acknowledged.durability)
    journal = await open_journal(directory, schema=SCHEMA, options=options)
    try:
        # Bytes that came inline pass through; which bytes are there is not what a ledger tells.
        memory = await load(journal, MemoryPayloadStore())
        partitions = [
            PartitionAudit(
                run.run_id,
                name,
                run.state.epoch,
                run.state.step,
                partition.ledger(),
                partition.dropped.worst(MOST_DROPPED),
            )
            for run in memory.runs
            for name, partition in run.partitions.items()
        ]
        return Audit(journal.position, journal.lost, partitions)
    finally:
        await journal.close()
