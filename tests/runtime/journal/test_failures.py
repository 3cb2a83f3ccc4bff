"""A commit that fails: full disks, I/O errors, an fsync that the disk did not confirm."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.runtime.errors import Code, TurnoutError
from services.runtime.journal import Durability, Durable, Journal, JournalState, Record
from services.runtime.journal.ballast import Ballast
from services.runtime.journal.failures import Cause, cause_of
from tests.runtime.journal.helpers import (
    KIB,
    Faults,
    chunked,
    fill,
    opened,
    options,
    records_of,
    snapshot_of,
    snapshots_in,
    sqlite_error,
)

INSERT = "INSERT INTO batches"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # a failed test may leave files open


async def _refused(durable: Durable) -> TurnoutError:
    with pytest.raises(TurnoutError) as refused:
        await durable
    return refused.value


async def test_a_failed_commit_fails_all_that_came_after_it(tmp_path: Path) -> None:
    """A record behind a hole must never be told durable, since a replay would not reach it."""
    faults = Faults()
    journal = await opened(tmp_path, options(Durability.FSYNC), seams=faults.seams())
    made = await fill(journal, 3)
    busy, go_on = threading.Event(), threading.Event()

    def fault(sql: str) -> None:
        if sql.startswith(INSERT):
            busy.set()
            assert go_on.wait(20)
            raise sqlite_error(sqlite3.SQLITE_IOERR_WRITE)

    faults.before = fault
    durables = [journal.append("s", b"fails itself")]
    await asyncio.to_thread(busy.wait, 20)
    for number in range(5):
        durables.append(journal.append("s", b"%d" % number))
        await asyncio.sleep(0)
    durables.append(journal.append("s", b"of a turn that is not over"))
    go_on.set()
    failed = asyncio.create_task(journal.failed())
    for durable in durables:
        error = await _refused(durable)
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "JOURNAL_IO")
    failure = await failed
    assert not failure.fatal
    assert journal.state is JournalState.FAILED
    assert journal.durable_position == 3
    with pytest.raises(TurnoutError, match="could not be written"):
        journal.append("s", b"late")
    with pytest.raises(TurnoutError, match="could not be written"):
        await journal.tail()
    with pytest.raises(TurnoutError, match="could not be written"):
        await journal.snapshot(3, chunked([]))
    faults.heal()
    await journal.reopen()
    assert (journal.state, journal.failure, journal.position, journal.incarnation) == (JournalState.OPEN, None, 3, 2)
    assert await records_of(journal) == made
    made += await fill(journal, 2)
    await journal.close()
    journal = await opened(tmp_path)
    assert await records_of(journal) == made
    await journal.close()


async def test_a_commit_that_failed_after_it_was_stored_is_found_again(tmp_path: Path) -> None:
    """The caller was told an error and repeats; only the reload can know that the first try is there."""
    faults = Faults()
    journal = await opened(tmp_path, seams=faults.seams())
    await fill(journal, 2)
    faults.fail(INSERT, sqlite3.SQLITE_IOERR_WRITE, times=1, stored=True)
    await _refused(journal.append("s", b"stored"))
    await journal.reopen()
    assert [record.payload for record in await records_of(journal)][2:] == [b"stored"]
    assert await journal.append("s", b"next") == 4
    await journal.close()


async def test_after_a_failed_fsync_the_process_has_to_exit(tmp_path: Path) -> None:
    """The kernel forgets the pages, so the next fsync would report success for bytes that are not on the disk."""
    faults = Faults()
    journal = await opened(tmp_path, options(Durability.FSYNC), seams=faults.seams())
    made = await fill(journal, 2)
    faults.fail(INSERT, sqlite3.SQLITE_IOERR_FSYNC, times=1)
    error = await _refused(journal.append("s", b"x"))
    assert error.reason == "JOURNAL_FSYNC_FAILED"
    assert (await journal.failed()).fatal
    assert journal.state is JournalState.FATAL
    with pytest.raises(TurnoutError, match="FATAL"):
        await journal.reopen()
    with pytest.raises(TurnoutError, match="did not confirm"):
        journal.append("s", b"x")
    await journal.close()
    journal = await opened(tmp_path, options(Durability.FSYNC))
    assert (await records_of(journal))[:2] == made
    await journal.close()


async def test_a_failed_fsync_of_a_checkpoint_is_as_fatal(tmp_path: Path) -> None:
    """It is the one that lets the WAL start over: believed, it loses what the database never got."""
    faults = Faults()
    chosen = options(checkpoint_bytes=16 * KIB)
    journal = await opened(tmp_path, chosen, seams=faults.seams())
    faults.fail("PRAGMA wal_checkpoint", sqlite3.SQLITE_IOERR_FSYNC)
    made = await fill(journal, 1, 20 * KIB)
    failure = await journal.failed()
    assert failure.fatal
    faults.heal()
    await journal.close()
    journal = await opened(tmp_path, chosen)
    assert await records_of(journal) == made
    await journal.close()


async def test_another_failure_of_a_checkpoint_stops_the_journal(tmp_path: Path) -> None:
    """With a WAL that cannot be copied, restarts get slower for ever."""
    faults = Faults()
    journal = await opened(tmp_path, options(checkpoint_bytes=16 * KIB), seams=faults.seams())
    faults.fail("PRAGMA wal_checkpoint", sqlite3.SQLITE_IOERR_READ, times=1)
    made = await fill(journal, 1, 20 * KIB)
    assert not (await journal.failed()).fatal
    await journal.reopen()
    assert await records_of(journal) == made
    await journal.close()


async def test_a_failed_reopening_may_be_tried_again(tmp_path: Path) -> None:
    """The disk may be full for longer than the owner's first try."""
    faults = Faults()
    journal = await opened(tmp_path, seams=faults.seams())
    made = await fill(journal, 2)
    faults.fail(INSERT, sqlite3.SQLITE_IOERR_WRITE)
    await _refused(journal.append("s", b"x"))
    faults.fail("UPDATE meta", sqlite3.SQLITE_FULL)
    for _ in range(2):
        with pytest.raises(TurnoutError) as refused:
            await journal.reopen()
        assert (refused.value.code, refused.value.reason) == (Code.RESOURCE_EXHAUSTED, "DISK_FULL")
        assert journal.state is JournalState.FAILED
    faults.heal()
    await journal.reopen()
    assert await records_of(journal) == made
    await journal.close()


async def test_a_fsync_that_fails_while_reopening_is_fatal(tmp_path: Path) -> None:
    """A second try in the same process would trust a kernel that has forgotten."""
    faults = Faults()
    journal = await opened(tmp_path, seams=faults.seams())
    await fill(journal, 2)
    faults.fail(INSERT, sqlite3.SQLITE_IOERR_WRITE)
    await _refused(journal.append("s", b"x"))
    faults.fail("PRAGMA wal_checkpoint", sqlite3.SQLITE_IOERR_FSYNC)
    with pytest.raises(TurnoutError, match="did not confirm"):
        await journal.reopen()
    assert journal.state is JournalState.FATAL
    await journal.close()


async def test_a_failed_journal_can_be_closed(tmp_path: Path) -> None:
    """A service that gives up must let go of the lock, without a commit that could succeed after all."""
    faults = Faults()
    journal = await opened(tmp_path, seams=faults.seams())
    faults.fail(INSERT, sqlite3.SQLITE_IOERR_WRITE)
    await _refused(journal.append("s", b"x"))
    await journal.close()
    assert journal.state is JournalState.CLOSED
    journal = await opened(tmp_path)
    assert await records_of(journal) == []
    await journal.close()


async def test_a_checkpoint_that_fails_at_the_end_costs_nothing(tmp_path: Path) -> None:
    """The records are in the WAL; the stop must still let go of everything."""
    faults = Faults()
    journal = await opened(tmp_path, seams=faults.seams())
    made = await fill(journal, 3)
    faults.fail("PRAGMA wal_checkpoint(TRUNCATE)", sqlite3.SQLITE_IOERR_READ)
    await journal.close()
    assert (await journal.failed()).error.reason == "JOURNAL_IO"
    journal = await opened(tmp_path)
    assert await records_of(journal) == made
    await journal.close()


@pytest.mark.parametrize(
    "statement", ["SELECT name", "SELECT first", "PRAGMA journal_mode", "UPDATE meta", "SELECT max"]
)
async def test_a_disk_that_cannot_be_read_is_not_called_damage(tmp_path: Path, statement: str) -> None:
    """An operator told of damage gives the journal up, though a cable may be all that is loose."""
    journal = await opened(tmp_path)
    made = await fill(journal, 3)
    await journal.close()
    faults = Faults()
    faults.fail(statement, sqlite3.SQLITE_IOERR_READ)
    with pytest.raises(TurnoutError) as refused:
        await opened(tmp_path, seams=faults.seams())
    assert (refused.value.code, refused.value.reason) == (Code.UNAVAILABLE, "JOURNAL_IO")
    journal = await opened(tmp_path)
    assert await records_of(journal) == made
    await journal.close()


async def test_a_directory_that_cannot_be_made_is_refused_clearly(tmp_path: Path) -> None:
    """The start failure must be a line for the operator, not a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(TurnoutError) as refused:
        await opened(tmp_path / "file" / "journal")
    assert refused.value.reason == "JOURNAL_IO"


async def test_a_read_error_while_serving_is_told_to_the_reader(tmp_path: Path) -> None:
    """It concerns one reader; commits go on."""
    faults = Faults()
    journal = await opened(tmp_path, seams=faults.seams())
    await fill(journal, 3)
    for code, reason in ((sqlite3.SQLITE_IOERR_READ, "JOURNAL_IO"), (sqlite3.SQLITE_CORRUPT, "JOURNAL_DAMAGED")):
        faults.fail("SELECT first", code)
        with pytest.raises(TurnoutError) as refused:
            await records_of(journal)
        assert refused.value.reason == reason
    faults.heal()
    await fill(journal, 1)
    assert len(await records_of(journal)) == 4
    await journal.close()
    with pytest.raises(TurnoutError):
        await records_of(journal, 0)


async def test_a_fault_of_the_program_fails_the_journal_too(tmp_path: Path) -> None:
    """A writer's thread that dies in silence would leave every caller waiting."""
    faults = Faults()

    def bug(sql: str) -> None:
        if sql.startswith(INSERT):
            raise RuntimeError("a bug")

    journal = await opened(tmp_path, seams=faults.seams())
    faults.before = bug
    error = await _refused(journal.append("s", b"x"))
    assert (error.code, error.reason) == (Code.INTERNAL, "JOURNAL_FAULT")
    faults.before = lambda sql: None
    await journal.reopen()
    await fill(journal, 1)
    await journal.close()


async def test_a_reader_learns_that_the_journal_was_opened_again(tmp_path: Path) -> None:
    """Its positions may have been given to other records since."""
    faults = Faults()
    journal = await opened(tmp_path, seams=faults.seams())
    await fill(journal, 4, 400 * KIB)
    replay = journal.replay()
    assert (await anext(replay)).position == 1
    faults.fail(INSERT, sqlite3.SQLITE_IOERR_WRITE, times=1)
    await _refused(journal.append("s", b"x"))
    await journal.reopen()
    with pytest.raises(TurnoutError) as refused:
        async for _ in replay:
            pass
    assert refused.value.reason == "JOURNAL_REOPENED"
    await journal.close()


async def test_a_full_disk_costs_the_ballast_first(tmp_path: Path) -> None:
    """Commits have to go on while the owner refuses what is new."""
    faults = Faults()
    journal = await opened(tmp_path, options(ballast_bytes=64 * KIB), seams=faults.seams())
    ballast = tmp_path / "journal.ballast"
    assert ballast.stat().st_size == 64 * KIB
    faults.fail(INSERT, sqlite3.SQLITE_FULL, times=1)
    assert await journal.append("s", b"x") == 1
    assert journal.short_of_space
    assert not ballast.exists()
    assert await journal.take_ballast()
    assert not journal.short_of_space
    assert ballast.stat().st_blocks * 512 >= 64 * KIB
    assert await journal.give_back_ballast()
    assert not await journal.give_back_ballast()
    assert journal.short_of_space
    assert await journal.append("s", b"y") == 2
    await journal.close()


async def test_a_full_disk_in_a_checkpoint_leaves_the_journal_open(tmp_path: Path) -> None:
    """The WAL still has room; the next commit asks again."""
    faults = Faults()
    journal = await opened(tmp_path, options(checkpoint_bytes=16 * KIB), seams=faults.seams())
    faults.fail("PRAGMA wal_checkpoint", sqlite3.SQLITE_FULL)
    made = await fill(journal, 3, 20 * KIB)
    assert journal.stats.wal_bytes > 40 * KIB
    faults.heal()
    while journal.stats.wal_bytes >= 16 * KIB:
        made += await fill(journal, 1)
    assert await records_of(journal) == made
    await journal.close()


async def _append_until_short(journal: Journal, size: int) -> None:
    while not journal.short_of_space:
        await journal.append("s", os.urandom(size))


async def test_a_really_full_disk_loses_nothing(small_disk: Path) -> None:
    """Ballast, commits, a snapshot with deletes, then the very end; afterwards space, and everything is there."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1 << 20))
    chosen = options(ballast_bytes=256 * KIB, checkpoint_bytes=64 * KIB)
    journal = await opened(small_disk / "journal", chosen)
    await _append_until_short(journal, 60 * KIB)
    for _ in range(5):
        await journal.append("s", b"small ones go on")
    assert not await journal.take_ballast()

    # Deleting stays possible, and what it frees within the database is used again.
    begin = journal.position
    await journal.snapshot(begin, chunked([b"state at %d" % begin]))
    for _ in range(20):
        await journal.append("s", os.urandom(60 * KIB))
    kept = await records_of(journal)
    assert len(kept) == 20

    # The very end.
    with contextlib.suppress(TurnoutError):
        while True:
            payload = os.urandom(100 * KIB)
            kept.append(Record(await journal.append("s", payload), "s", payload))
    failure = await journal.failed()
    assert (failure.error.code, failure.error.reason) == (Code.RESOURCE_EXHAUSTED, "DISK_FULL")
    assert not failure.fatal

    filler.unlink()
    await journal.reopen()
    assert await records_of(journal) == kept
    assert await snapshot_of(journal) == [b"state at %d" % begin]
    assert not journal.short_of_space
    await fill(journal, 1)
    await journal.close()


async def test_a_snapshot_that_finds_the_disk_full_leaves_all_as_it_was(small_disk: Path) -> None:
    """It must neither fail the journal nor keep the space that it took."""
    journal = await opened(small_disk / "journal", options(checkpoint_bytes=64 * KIB))
    made = await fill(journal, 10)
    with pytest.raises(TurnoutError) as refused:
        await journal.snapshot(10, chunked([bytes(512 * KIB)] * 16))
    assert refused.value.reason == "DISK_FULL"
    made += await fill(journal, 10, 60 * KIB)  # would not fit beside what the snapshot took
    assert await records_of(journal) == made
    assert snapshots_in(small_disk / "journal") == []
    await journal.snapshot(10, chunked([b"small"]))
    await journal.close()


def test_the_ballast_leaves_as_much_free_as_it_takes(small_disk: Path) -> None:
    """Taken at the first free bytes, it would fill the disk again at once, and be given back, for ever."""
    (small_disk / "filler").write_bytes(bytes(3 << 20))
    assert not Ballast(small_disk / "ballast", 600 * KIB).take()
    assert not (small_disk / "ballast").exists()
    assert Ballast(small_disk / "ballast", 400 * KIB).take()


def test_no_ballast_is_never_missing(tmp_path: Path) -> None:
    """A service configured without one would refuse everything for want of space."""
    ballast = Ballast(tmp_path / "ballast", 0)
    assert not ballast.take()
    assert not ballast.given_back


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (sqlite_error(sqlite3.SQLITE_FULL), Cause.DISK_FULL),
        (sqlite_error(sqlite3.SQLITE_IOERR_FSYNC), Cause.FSYNC),
        (sqlite_error(sqlite3.SQLITE_IOERR_DIR_FSYNC), Cause.FSYNC),
        (sqlite_error(sqlite3.SQLITE_IOERR_WRITE), Cause.IO),
        (sqlite_error(sqlite3.SQLITE_CORRUPT), Cause.DAMAGE),
        (sqlite3.OperationalError("no code"), Cause.FAULT),
        (OSError(errno.ENOSPC, "full"), Cause.DISK_FULL),
        (OSError(errno.EDQUOT, "quota"), Cause.DISK_FULL),
        (OSError(errno.EIO, "broken"), Cause.IO),
        (RuntimeError("bug"), Cause.FAULT),
    ],
)
def test_causes(error: Exception, cause: Cause) -> None:
    """A full disk taken for a broken one would stop the service for good, an fsync taken for a write go on."""
    assert cause_of(error) is cause
