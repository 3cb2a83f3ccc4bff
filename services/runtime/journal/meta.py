"""The schema of the database, and the one row that says what journal it is.

Invariants: the row carries its own checksum; a journal of another format is refused before anything else of it is read;
the schema is exactly the one below.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import google_crc32c

from services.runtime.journal.failures import damaged, unknown_format

FORMAT: Final = 1
"""Raised whenever a program of the former number could misread the files."""

_TABLES: Final = {
    "batches": (
        "CREATE TABLE batches (first INTEGER PRIMARY KEY, count INTEGER NOT NULL, "
        "previous INTEGER NOT NULL, crc INTEGER NOT NULL, body BLOB NOT NULL)"
    ),
    "meta": (
        "CREATE TABLE meta (id INTEGER PRIMARY KEY CHECK (id = 1), format INTEGER NOT NULL, "
        "schema TEXT NOT NULL, journal_id BLOB NOT NULL, incarnation INTEGER NOT NULL, "
        "snapshot_position INTEGER NOT NULL, snapshot_crc INTEGER NOT NULL, crc INTEGER NOT NULL)"
    ),
}
_COLUMNS: Final = "format, schema, journal_id, incarnation, snapshot_position, snapshot_crc"


class Cursor(Protocol):
    """What is used of sqlite3.Cursor."""

    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def close(self) -> None: ...


class Connection(Protocol):
    """What is used of sqlite3.Connection; tests put faults in between."""

    def execute(self, sql: str, parameters: tuple[object, ...] = ..., /) -> Cursor: ...
    def close(self) -> None: ...


Connect = Callable[[Path, str], Connection]
"""Opens a database file in a mode of SQLite: ro, rw or rwc."""


def connect_sqlite(path: Path, mode: str) -> Connection:
    """Open `path`; the connection may be used by one thread after another."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0.0)


@dataclass(frozen=True, slots=True)
class Meta:
    """What journal this is, how often it was opened, and which snapshot is its beginning (position 0 = none)."""

    schema: str
    journal_id: bytes
    incarnation: int = 0
    snapshot_position: int = 0
    snapshot_crc: int = 0

    def next_incarnation(self) -> Meta:
        """Return the same one opening later."""
        return replace(self, incarnation=self.incarnation + 1)

    def with_snapshot(self, position: int, crc: int) -> Meta:
        """Return the same with another beginning."""
        return replace(self, snapshot_position=position, snapshot_crc=crc)

    @property
    def _row(self) -> tuple[object, ...]:
        return (
            FORMAT,
            self.schema,
            self.journal_id,
            self.incarnation,
            self.snapshot_position,
            self.snapshot_crc,
        )

    def create(self, connection: Connection) -> None:
        """Make the tables and the row, all or nothing."""
        connection.execute("BEGIN IMMEDIATE")
        for statement in _TABLES.values():
            connection.execute(statement)
        connection.execute(f"INSERT INTO meta (id, {_COLUMNS}, crc) VALUES (1, ?, ?, ?, ?, ?, ?, ?)", self._sealed())
        connection.execute("COMMIT")

    def store(self, connection: Connection) -> None:
        """Write the row anew."""
        connection.execute(f"UPDATE meta SET ({_COLUMNS}, crc) = (?, ?, ?, ?, ?, ?, ?) WHERE id = 1", self._sealed())

    def _sealed(self) -> tuple[object, ...]:
        return (*self._row, _seal(self._row))


def read_meta(connection: Connection, file: str, schema: str) -> Meta | None:
    """Return the row; None if the database is empty.

    Raises FAILED_PRECONDITION / JOURNAL_FORMAT for another format or another owner's schema, DATA_LOSS for damage, and
    sqlite3.Error.
    """
    tables = dict(connection.execute("SELECT name, sql FROM sqlite_master").fetchall())
    if not tables:
        return None
    # Before all else: what a later format holds besides its number is unknown.
    found = connection.execute("SELECT format FROM meta").fetchone()
    if found is not None and found[0] != FORMAT:
        raise unknown_format("format", found[0], FORMAT)
    if tables != _TABLES:
        raise damaged(file, "the schema of the database is damaged", last_good=0)
    rows = connection.execute(f"SELECT {_COLUMNS}, crc FROM meta").fetchall()
    if len(rows) != 1 or _seal(rows[0][:-1]) != rows[0][-1]:
        raise damaged(file, "the head row of the database is damaged", last_good=0)
    meta = Meta(*rows[0][1:-1])
    if meta.schema != schema:
        raise unknown_format("schema", meta.schema, schema)
    return meta


def _seal(row: tuple[object, ...]) -> int:
    crc: int = google_crc32c.value(repr(row).encode("utf-8", "surrogatepass"))
    return crc
