"""The journal: an ordered, durable log of records for a service that keeps its state in memory.

One directory, one service, one process. Records are bytes whose meaning is the service's. See `journal.Journal` for
what it promises and how it is used, `options.Durability` for what each level survives.
"""

from __future__ import annotations

from pathlib import Path

from services.runtime.errors import failed_precondition
from services.runtime.journal.batch import MAX_RECORD_BYTES, Record
from services.runtime.journal.durable import Durable
from services.runtime.journal.failures import JournalFailure
from services.runtime.journal.files import JournalFiles
from services.runtime.journal.journal import Journal, JournalState, JournalStats
from services.runtime.journal.memory import MemoryJournal
from services.runtime.journal.opening import Seams
from services.runtime.journal.options import DURABILITY_HELP, Durability, JournalOptions, durability_of
from services.runtime.journal.sqlite import SqliteJournal

__all__ = [
    "DURABILITY_HELP",
    "MAX_RECORD_BYTES",
    "Durability",
    "Durable",
    "Journal",
    "JournalFailure",
    "JournalOptions",
    "JournalState",
    "JournalStats",
    "Record",
    "durability_of",
    "open_journal",
]


async def open_journal(
    directory: Path, *, schema: str, options: JournalOptions | None = None, seams: Seams | None = None
) -> Journal:
    """Open the journal in `directory`, on a local disk; make both if they are not there.

    `schema` names the owner and the version of its records, such as "buffer/1"; a journal of another one is refused.
    Everything that is stored is verified before this returns. Raises TurnoutError:
    DATA_LOSS / JOURNAL_DAMAGED with `last_good_position`: nothing was changed, and nothing is served;
    FAILED_PRECONDITION / JOURNAL_FORMAT: written by another release, or for another owner;
    FAILED_PRECONDITION / JOURNAL_LOCKED: open in another service;
    FAILED_PRECONDITION / JOURNAL_PRESENT: durability `none`, but there are records that would go stale;
    RESOURCE_EXHAUSTED / DISK_FULL, UNAVAILABLE / JOURNAL_IO or JOURNAL_FSYNC_FAILED: it could not be written.
    """
    options = options or JournalOptions()
    if options.durability is not Durability.NONE:
        return await SqliteJournal.open(directory, schema=schema, options=options, seams=seams or Seams())
    if JournalFiles(directory).hold_records():
        message = (
            f"there is a journal in {directory}, which durability none would neither read nor keep up; move it away"
        )
        raise failed_precondition("JOURNAL_PRESENT", message, directory=directory)
    return MemoryJournal()
