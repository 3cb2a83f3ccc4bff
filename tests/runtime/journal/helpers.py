"""What the tests of the journal share."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from services.runtime.journal import Durability, Journal, JournalOptions, Record, open_journal
from services.runtime.journal.meta import Connection, Cursor, connect_sqlite
from services.runtime.journal.opening import Seams

SCHEMA = "test/1"
KIB = 1 << 10


def options(
    durability: Durability = Durability.OS,
    *,
    ballast_bytes: int = 0,
    checkpoint_bytes: int = 1 << 20,
    compact_bytes: int = 1 << 20,
) -> JournalOptions:
    """Options without a ballast, unless one is asked for."""
    return JournalOptions(
        durability=durability,
        ballast_bytes=ballast_bytes,
        checkpoint_bytes=checkpoint_bytes,
        compact_bytes=compact_bytes,
    )


async def opened(
    directory: Path, chosen: JournalOptions | None = None, *, seams: Seams | None = None, schema: str = SCHEMA
) -> Journal:
    """Open a journal for a test."""
    return await open_journal(directory, schema=schema, options=chosen or options(), seams=seams)


async def records_of(journal: Journal, after: int | None = None) -> list[Record]:
    """Replay into a list."""
    return [record async for record in journal.replay(after)]


async def snapshot_of(journal: Journal) -> list[bytes]:
    """Read the snapshot into a list."""
    return [chunk async for chunk in journal.read_snapshot()]


def snapshots_in(directory: Path) -> list[str]:
    """Return the names of the snapshots, unfinished ones included."""
    return sorted(path.name for path in directory.glob("snapshot-*"))


async def fill(journal: Journal, count: int, size: int = 100, stream: str = "s") -> list[Record]:
    """Append `count` records, each in a commit of its own, and return them."""
    made: list[Record] = []
    for _ in range(count):
        payload = f"{journal.position + 1}:".encode().ljust(size, b".")
        made.append(Record(await journal.append(stream, payload), stream, payload))
    return made


async def chunked(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Chunks for a snapshot."""
    for chunk in chunks:
        yield chunk


def image(source: Path, target: Path) -> Path:
    """Copy a directory as a crash at this moment would leave it.

    By another process: closing a descriptor of the database in this one would drop SQLite's locks.
    """
    subprocess.run(["cp", "-r", source, target], check=True)
    return target


def sqlite_error(code: int) -> sqlite3.OperationalError:
    """An error as SQLite raises it."""
    error = sqlite3.OperationalError(f"injected error {code}")
    error.sqlite_errorcode = code
    return error


class Faults:
    """Puts faults between a journal and SQLite: `before` and `after` see every statement and may raise."""

    def __init__(self) -> None:
        self.before: Callable[[str], None] = lambda sql: None
        self.after: Callable[[str], None] = lambda sql: None

    def seams(self) -> Seams:
        """Seams with these faults."""
        return Seams(connect=lambda path, mode: _Faulty(connect_sqlite(path, mode), self))

    def fail(self, statement: str, code: int, *, times: int = 1_000_000, stored: bool = False) -> None:
        """Let statements that begin so fail; `stored`: only after they took effect."""
        left = times

        def fault(sql: str) -> None:
            nonlocal left
            if sql.startswith(statement) and left > 0:
                left -= 1
                raise sqlite_error(code)

        if stored:
            self.after = fault
        else:
            self.before = fault

    def heal(self) -> None:
        """No faults any more."""
        self.before = self.after = lambda sql: None


class _Faulty:
    def __init__(self, real: Connection, faults: Faults) -> None:
        self._real = real
        self._faults = faults

    def execute(self, sql: str, parameters: tuple[object, ...] = (), /) -> Cursor:
        self._faults.before(sql)
        cursor = self._real.execute(sql, parameters)
        self._faults.after(sql)
        return cursor

    def close(self) -> None:
        self._real.close()
