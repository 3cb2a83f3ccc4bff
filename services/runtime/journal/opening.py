"""Opening a journal: verify, then prepare for writing.

Invariants: until everything was verified nothing is changed, so a refused journal keeps all the evidence it has; a
journal that cannot be shown to hold every acknowledged record is refused, never begun anew. The one loss that is
accepted is that of durability `os` after the machine restarted, which is what that level means; it is reported.

Order of creation: the mark first, then the database, so that no crash leaves a database without a mark.
"""

from __future__ import annotations

import secrets
import sqlite3
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from services.runtime.journal.ballast import Ballast
from services.runtime.journal.database import Contents, Database, configure, verify
from services.runtime.journal.failures import Cause, cause_of, damaged, failure_of, is_damage
from services.runtime.journal.files import JournalFiles
from services.runtime.journal.mark import Acknowledged, Mark, read_mark
from services.runtime.journal.meta import Connect, Meta, connect_sqlite, read_meta
from services.runtime.journal.options import Durability, JournalOptions
from services.runtime.journal.snapshot import SnapshotReader

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NO_BOOT_ID: Final = bytes(16)


def read_boot_id() -> bytes:
    """Return what tells one boot of the machine from the next; zeros where the system does not say.

    With zeros every boot looks the same, so a loss after a restart of the machine is refused instead of reported.
    """
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return _NO_BOOT_ID


@dataclass(frozen=True, slots=True)
class Seams:
    """What a journal takes from outside, for tests to replace."""

    connect: Connect = connect_sqlite
    new_id: Callable[[], bytes] = lambda: secrets.token_bytes(16)
    boot_id: Callable[[], bytes] = read_boot_id


class Opened(NamedTuple):
    """An open database, and how many acknowledged records the machine's restart cost."""

    database: Database
    lost: int


def open_database(files: JournalFiles, options: JournalOptions, schema: str, ballast: Ballast, seams: Seams) -> Opened:
    """Open the journal in `files`, or make it. The caller holds the lock.

    Raises DATA_LOSS / JOURNAL_DAMAGED, FAILED_PRECONDITION / JOURNAL_FORMAT, or what a failed write means.
    """
    acknowledged = read_mark(files.mark)
    contents = _verified(files, schema, seams)
    if acknowledged is None:
        if files.hold_records():
            last_good = contents.position if contents else 0
            raise damaged(files.mark.name, "the mark of what was acknowledged is missing", last_good=last_good)
        acknowledged = Acknowledged(seams.new_id(), options.durability, seams.boot_id(), 0)
        Mark(files.mark, acknowledged).close()
        files.sync_directory()
    lost = _missing(files, acknowledged, contents, seams)
    position = contents.position if contents else 0
    try:
        database = _prepare(files, options, schema, ballast, seams, acknowledged.journal_id, contents)
    except sqlite3.Error as error:
        if cause_of(error) is Cause.DAMAGE:
            raise damaged(files.database.name, str(error), last_good=position) from error
        raise failure_of(error).error from error
    return Opened(database, lost)


def _verified(files: JournalFiles, schema: str, seams: Seams) -> Contents | None:
    """Return what the database holds; None if there is none yet. Changes nothing."""
    # SQLite would delete the WAL of a database of no length, which may be all that is left.
    if not files.database.exists() or files.database.stat().st_size == 0:
        return None
    connection = seams.connect(files.database, "ro")
    try:
        meta = read_meta(connection, files.database.name, schema)
        if meta is None:
            return None
        if meta.snapshot_position:
            _verify_snapshot(files, meta)
        return verify(connection, files, meta)
    except sqlite3.Error as error:
        if is_damage(error):
            raise damaged(files.database.name, str(error), last_good=0) from error
        raise failure_of(error).error from error
    finally:
        connection.close()


def _verify_snapshot(files: JournalFiles, meta: Meta) -> None:
    reader = SnapshotReader(files, meta.journal_id, meta.snapshot_position, meta.snapshot_crc)
    try:
        for _ in reader:
            pass
    finally:
        reader.close()


def _missing(files: JournalFiles, acknowledged: Acknowledged, contents: Contents | None, seams: Seams) -> int:
    """Return how many acknowledged records are missing, if that is allowed; else raise DATA_LOSS."""
    name = files.database.name
    if contents is None:
        if acknowledged.position:
            detail = "the database is missing"
            raise damaged(name, detail, last_good=0, acknowledged=acknowledged.position)
        return 0
    if acknowledged.journal_id != contents.meta.journal_id:
        detail = "the mark belongs to another journal"
        raise damaged(files.mark.name, detail, last_good=contents.position)
    missing = max(0, acknowledged.position - contents.position)
    restarted = acknowledged.boot_id != seams.boot_id()
    if missing and not (restarted and acknowledged.durability is Durability.OS):
        detail = f"{missing} acknowledged records are missing at its end"
        raise damaged(name, detail, last_good=contents.position, acknowledged=acknowledged.position)
    return missing


def _prepare(
    files: JournalFiles,
    options: JournalOptions,
    schema: str,
    ballast: Ballast,
    seams: Seams,
    journal_id: bytes,
    contents: Contents | None,
) -> Database:
    ballast.drop()  # A full disk needs the space for what follows; it is taken again at the end.
    if contents is None:
        # What is here belongs to a creation that was cut short; nothing was ever acknowledged from it.
        contents = Contents(Meta(schema, journal_id), 0, 0, 0)
        create = True
    else:
        create = False
    contents = contents._replace(meta=contents.meta.next_incarnation())
    connection = seams.connect(files.database, "rwc")
    try:
        configure(connection, options)
        if create:
            contents.meta.create(connection)
        else:
            # What the WAL holds may be in memory alone, marked clean by an fsync that failed in the process before:
            # copying it makes the pages dirty again, and this time the sync tells the truth.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            contents.meta.store(connection)
    finally:
        connection.close()
    files.sync_directory()
    said = Acknowledged(journal_id, options.durability, seams.boot_id(), contents.position)
    database = Database(files, options, seams.connect, contents, ballast, Mark(files.mark, said))
    try:
        # What a crash left of a snapshot and of the deletions after it.
        while database.delete_slice():
            pass
        database.log_bytes = contents.log_bytes
        database.remove_old_snapshots()
        ballast.take()
    except BaseException:
        database.close(checkpoint=False)
        raise
    return database
