"""The SQLite database of a journal, without threads of its own.

Invariants:
- Three connections: one writes, one reads, one checkpoints; each is used by one thread at a time. Every transaction of
  the writer is one statement, so there is nothing to roll back.
- A reader holds a transaction only for one slice: a long one would keep the WAL from ever starting over.
- The WAL is copied into the database beside the writer; only the rest that came meanwhile is copied while the writer
  waits, since without that moment of silence a busy WAL never starts over and grows without end.
- No vacuum, neither full nor incremental: pages of deleted batches are filled by the next ones, so the file stays as
  large as the largest log between two snapshots; giving space back would write more pages than it frees.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from services.runtime.errors import out_of_range
from services.runtime.journal.ballast import Ballast
from services.runtime.journal.batch import Batch, BrokenChainError, Chain, batch_crc
from services.runtime.journal.failures import Cause, cause_of, damaged, is_damage
from services.runtime.journal.files import JournalFiles
from services.runtime.journal.mark import Mark
from services.runtime.journal.meta import Connect, Connection, Meta
from services.runtime.journal.options import Durability, JournalOptions

SLICE_BYTES: Final = 1 << 20
"""Read at once during a replay: a millisecond of the reader's transaction and of the loop that decodes it."""

DELETE_BYTES: Final = 2 << 20
"""Deleted at once: commits wait about 2 ms for it."""

_DELETE_ROWS: Final = 256
_PAGE: Final = 4096
_PAGES_BESIDE_BODY: Final = 3
"""Pages that a commit writes besides its body: a leaf, its parent, a page of the free list."""

_BATCH: Final = "SELECT first, count, previous, crc, body FROM batches"

R = TypeVar("R")


class Contents(NamedTuple):
    """What a sound journal was found to hold when it was opened."""

    meta: Meta
    position: int
    crc: int
    log_bytes: int


class Database:
    """An open, verified database."""

    def __init__(
        self,
        files: JournalFiles,
        options: JournalOptions,
        connect: Connect,
        contents: Contents,
        ballast: Ballast,
        mark: Mark,
    ) -> None:
        self.files = files
        self.meta = contents.meta
        self.position = contents.position
        self.log_bytes = contents.log_bytes
        self.wal_bytes = 0
        self.snapshot_bytes = self._snapshot_size()
        self._crc = contents.crc
        self._ballast = ballast
        self._mark = mark
        self._write_gate = threading.Lock()
        self._read_gate = threading.Lock()
        self._connections: list[Connection] = []
        try:
            self._writer = self._connect(connect, options)
            self._reader = self._connect(connect, options)
            self._checkpointer = self._connect(connect, options)
        except BaseException:
            self.close(checkpoint=False)
            raise

    def append(self, count: int, body: bytes) -> None:
        """Commit one batch; it is durable on return. Raises sqlite3.Error or OSError, and then it may be stored or not.

        If the disk is full the ballast is given back and the commit tried once more: SQLite has rolled back by then.
        """
        with self._write_gate:
            self._append(count, body)

    def append_at_once(self, count: int, body: bytes) -> bool:
        """Commit one batch like `append`, unless that would have to wait for a checkpoint; return whether it did."""
        if not self._write_gate.acquire(blocking=False):
            return False
        try:
            self._append(count, body)
        finally:
            self._write_gate.release()
        return True

    def _append(self, count: int, body: bytes) -> None:
        first = self.position + 1
        crc = batch_crc(self._crc, first, count, body)
        row = (first, count, self._crc, crc, body)
        self._with_ballast(lambda: self._writer.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", row))
        self.wal_bytes += (len(body) // _PAGE + _PAGES_BESIDE_BODY) * _PAGE
        self.position += count
        self._crc = crc
        self.log_bytes += len(body)
        self._mark.write(self.position)

    def begin_with_snapshot(self, position: int, crc: int) -> None:
        """Let the journal begin with a snapshot. Raises sqlite3.Error or OSError."""
        meta = self.meta.with_snapshot(position, crc)
        with self._write_gate:
            self._with_ballast(lambda: meta.store(self._writer))
            self.wal_bytes += _PAGES_BESIDE_BODY * _PAGE
        self.meta = meta
        self.snapshot_bytes = self._snapshot_size()

    def remove_old_snapshots(self) -> None:
        """Remove every other snapshot, once the disk is sure to name the current one, in every durability."""
        if self.checkpoint():
            current = self.files.snapshot(self.meta.snapshot_position)
            for path in list(self.files.snapshots()):
                if path != current:
                    path.unlink()

    def delete_slice(self) -> bool:
        """Delete some of the batches that the snapshot stands for; return whether there are more."""
        with self._write_gate:
            rows = self._writer.execute(
                "SELECT first, length(body) FROM batches WHERE first + count - 1 <= ? ORDER BY first LIMIT ?",
                (self.meta.snapshot_position, _DELETE_ROWS),
            ).fetchall()
            if not rows:
                return False
            size, last = 0, 0
            for first, length in rows:
                size, last = size + length, first
                if size >= DELETE_BYTES:
                    break
            self._with_ballast(lambda: self._writer.execute("DELETE FROM batches WHERE first <= ?", (last,)))
            self.log_bytes -= size
            self.wal_bytes += _PAGES_BESIDE_BODY * _PAGE
        return True

    def read_slice(self, chain: Chain, until: int) -> list[Batch]:
        """Return the next batches, up to the one that holds position `until`, about SLICE_BYTES of them.

        Raises OUT_OF_RANGE / JOURNAL_COMPACTED if a snapshot took their place, DATA_LOSS, or sqlite3.Error.
        """
        batches: list[Batch] = []
        size = 0
        with self._read_gate:
            # The first batch may begin before the position that is asked for; the later ones begin at it.
            begin = "coalesce((SELECT max(first) FROM batches WHERE first <= ?), ?)"
            asked = (chain.next_position, chain.next_position)
            rows = self._reader.execute(f"{_BATCH} WHERE first >= {begin} ORDER BY first", asked)
            try:
                while chain.next_position <= until and size < SLICE_BYTES:
                    row = rows.fetchone()
                    if row is None:
                        raise BrokenChainError(
                            f"the batch at position {chain.next_position} is missing", chain.next_position - 1
                        )
                    batches.append(chain.accept(row))
                    size += len(batches[-1].body)
            except BrokenChainError as broken:
                self.require_present(chain.next_position - 1)
                raise damaged(self.files.database.name, broken.detail, last_good=broken.last_good) from None
            finally:
                rows.close()
        return batches

    def require_present(self, after: int) -> None:
        """Refuse a replay of records that a snapshot has taken the place of (OUT_OF_RANGE / JOURNAL_COMPACTED)."""
        begin = self.meta.snapshot_position
        if after < begin:
            message = f"records up to {begin} were replaced by a snapshot; cannot read after {after}"
            raise out_of_range("JOURNAL_COMPACTED", message, field="after", value=after, snapshot_position=begin)

    def checkpoint(self) -> bool:
        """Copy and sync the WAL into the database so that it starts over. Raises sqlite3.Error or OSError.

        False: a stranger's reader still holds the WAL; the next commit asks again.
        """
        self._with_ballast(lambda: self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone())
        with self._write_gate, self._read_gate:
            busy = self._with_ballast(
                lambda: self._checkpointer.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0]
            )
            if not busy:
                self.wal_bytes = 0
            return not busy

    def close(self, *, checkpoint: bool) -> None:
        """Close the files. `checkpoint`: leave no WAL behind, so that a copy of the database is whole."""
        with self._write_gate, self._read_gate:
            try:
                if checkpoint:
                    self._checkpointer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                for connection in self._connections:
                    connection.close()
                self._connections.clear()
                self._mark.close()

    def _snapshot_size(self) -> int:
        position = self.meta.snapshot_position
        return self.files.snapshot(position).stat().st_size if position else 0

    def _connect(self, connect: Connect, options: JournalOptions) -> Connection:
        connection = connect(self.files.database, "rw")
        self._connections.append(connection)
        configure(connection, options)
        return connection

    def _with_ballast(self, step: Callable[[], R]) -> R:
        try:
            return step()
        except (sqlite3.Error, OSError) as error:
            if cause_of(error) is not Cause.DISK_FULL or not self._ballast.give_back():
                raise
        return step()


def configure(connection: Connection, options: JournalOptions) -> None:
    """Set what a connection needs. Nothing here is kept in the file but the WAL mode."""
    level = "FULL" if options.durability is Durability.FSYNC else "NORMAL"
    for pragma in (
        "journal_mode = WAL",
        f"synchronous = {level}",
        "wal_autocheckpoint = 0",
        f"journal_size_limit = {options.checkpoint_bytes}",  # a WAL that once grew longer shrinks when it starts over
        "secure_delete = OFF",  # some builds have it on, and write every deleted page through the WAL
        "fullfsync = ON",  # macOS alone: a plain fsync there does not reach the disk
        "checkpoint_fullfsync = ON",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()


def verify(connection: Connection, files: JournalFiles, meta: Meta) -> Contents:
    """Read everything, change nothing. Raises DATA_LOSS with the last good position, or sqlite3.Error if unreadable."""
    name = files.database.name
    chain = Chain(meta.snapshot_position + 1)
    log_bytes = 0
    try:
        start = connection.execute("SELECT max(first) FROM batches WHERE first <= ?", (chain.next_position,)).fetchone()
        rows = connection.execute(f"{_BATCH} WHERE first >= ? ORDER BY first", (start[0] or 0,))
        while (row := rows.fetchone()) is not None:
            if not _is_behind(row, meta.snapshot_position):
                log_bytes += len(chain.accept(row).body)
        rows.close()
        check = connection.execute("PRAGMA quick_check(1)").fetchone()
    except BrokenChainError as broken:
        raise damaged(name, broken.detail, last_good=broken.last_good) from None
    except sqlite3.Error as error:
        if is_damage(error):
            raise damaged(name, str(error), last_good=chain.next_position - 1) from None
        raise
    if check != ("ok",):
        raise damaged(name, f"the database is damaged: {check}", last_good=chain.next_position - 1)
    return Contents(meta, chain.next_position - 1, chain.crc or 0, log_bytes)


def _is_behind(row: tuple[object, ...], snapshot_position: int) -> bool:
    """Return whether a row holds only records that the snapshot stands for: a crash came before its deletion."""
    first, count = row[0], row[1]
    return isinstance(first, int) and isinstance(count, int) and first + count - 1 <= snapshot_position
