"""The baselines of the journal bench: the same records, stored with nothing in between.

Invariants: one thread that blocks; each store makes what it was given durable before it returns: synced to the disk
(`sync`), or handed to the kernel. The file takes all records of a call in one write, the best that grouping can do;
SQLite commits each record on its own, which is what a service without group commit does.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_SQLITE_LEVEL: Final = {True: "FULL", False: "NORMAL"}


class BareFile:
    """An append-only file: write, and fdatasync if `sync`."""

    groups = True

    def __init__(self, path: Path, *, sync: bool) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._sync = sync

    def store(self, records: Sequence[bytes]) -> None:
        """Store records together."""
        os.write(self._descriptor, b"".join(records))
        if self._sync:
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


class BareSqlite:
    """A table in WAL mode: one insert and one commit per record."""

    groups = False

    def __init__(self, path: Path, *, sync: bool) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA synchronous = {_SQLITE_LEVEL[sync]}")
        self._connection.execute("CREATE TABLE records (position INTEGER PRIMARY KEY, body BLOB NOT NULL)")

    def store(self, records: Sequence[bytes]) -> None:
        """Store records one after the other."""
        for record in records:
            self._connection.execute("INSERT INTO records (body) VALUES (?)", (record,))

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()
