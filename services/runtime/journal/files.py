"""The files of a journal, all in one directory of its own.

Invariants: a name that was created or renamed is durable only after its directory was synced. While the database is
open, nothing but SQLite opens its files: closing any other descriptor of them would drop SQLite's locks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class JournalFiles:
    """Paths within `directory`."""

    directory: Path

    @property
    def database(self) -> Path:
        """The SQLite database; SQLite adds `-wal` and `-shm` beside it."""
        return self.directory / "journal.db"

    @property
    def wal(self) -> Path:
        """The write-ahead log of the database."""
        return self.directory / "journal.db-wal"

    @property
    def mark(self) -> Path:
        """How far records were acknowledged."""
        return self.directory / "journal.mark"

    @property
    def lock(self) -> Path:
        """Held by the one process that has the journal open."""
        return self.directory / "journal.lock"

    @property
    def ballast(self) -> Path:
        """Space in reserve."""
        return self.directory / "journal.ballast"

    def snapshot(self, position: int) -> Path:
        """The snapshot that stands for everything up to `position`."""
        return self.directory / f"snapshot-{position:020d}"

    def snapshots(self) -> Iterator[Path]:
        """Every snapshot, unfinished ones included."""
        return self.directory.glob("snapshot-*")

    def begun(self) -> bool:
        """Return whether anything is left of a journal: its mark comes first and never goes."""
        return self.mark.exists() or self.hold_records()

    def hold_records(self) -> bool:
        """Return whether anything is here that may hold records."""
        return self.database.exists() or self.wal.exists() or any(True for _ in self.snapshots())

    def sync_directory(self) -> None:
        """Make names durable."""
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
