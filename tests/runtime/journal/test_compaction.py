"""Snapshots, deletions and the WAL, while records are appended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.runtime.errors import Code, TurnoutError
from services.runtime.journal import Durability, Durable, Journal
from services.runtime.journal.mark import read_mark
from services.runtime.journal.opening import Seams
from services.runtime.journal.sqlite import WAL_BOUND
from tests.runtime.journal.helpers import (
    KIB,
    Faults,
    chunked,
    fill,
    image,
    opened,
    options,
    records_of,
    snapshot_of,
    snapshots_in,
    sqlite_error,
)


async def _state(journal: Journal) -> list[bytes]:
    """Return what a service would rebuild: every payload so far."""
    return await snapshot_of(journal) + [record.payload for record in await records_of(journal)]


@pytest.mark.parametrize("level", [Durability.FSYNC, Durability.OS])
async def test_a_snapshot_takes_the_place_of_what_came_before_it(tmp_path: Path, level: Durability) -> None:
    """A restart reads it and the records after it, also where it ends within a batch."""
    journal = await opened(tmp_path, options(level))
    for number in range(10):
        journal.append("s", b"%d" % number)  # one batch
    await journal.tail()
    await journal.snapshot(7, chunked([b"0 to 6", b"", b"x" * 3_000_000]))
    for _ in range(2):
        assert journal.snapshot_position == 7
        assert await snapshot_of(journal) == [b"0 to 6", b"", b"x" * 3_000_000]
        assert [record.payload for record in await records_of(journal)] == [b"7", b"8", b"9"]
        await journal.close()
        journal = await opened(tmp_path, options(level))
    await journal.snapshot(10, chunked([]))
    assert await records_of(journal) == []
    assert await snapshot_of(journal) == []
    assert await journal.append("s", b"10") == 11
    await journal.close()
    journal = await opened(tmp_path, options(level))
    assert [record.position for record in await records_of(journal)] == [11]
    assert len(snapshots_in(tmp_path)) == 1
    await journal.close()


async def test_records_come_in_while_a_snapshot_is_written(tmp_path: Path) -> None:
    """Compaction must not stop the service, and must not swallow what came meanwhile."""
    journal = await opened(tmp_path, options(checkpoint_bytes=64 * KIB))
    expected: list[bytes] = []
    enough, stop = asyncio.Event(), asyncio.Event()

    async def append(number: int) -> None:
        count = 0
        while not stop.is_set():
            payload = f"{number}:{count}".encode().ljust(1000, b".")
            count += 1
            expected.append(payload)
            if await journal.append("s", payload) >= 200:
                enough.set()

    async def state(length: int) -> AsyncIterator[bytes]:
        for payload in expected[:length]:
            yield payload
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(append(number))
        await enough.wait()
        for _ in range(4):
            before = journal.position
            await journal.snapshot(journal.position, state(journal.position))
            assert journal.position > before
        stop.set()
    assert await _state(journal) == expected
    await journal.close()
    journal = await opened(tmp_path)
    assert await _state(journal) == expected
    assert len(snapshots_in(tmp_path)) == 1
    await journal.close()


async def test_a_snapshot_waits_for_records_whose_effects_it_may_hold(tmp_path: Path) -> None:
    """Chunks made late hold effects of late records; a crash must not keep those effects without the records."""
    faults = Faults()
    order: list[str] = []
    journal = await opened(tmp_path, seams=faults.seams())
    await fill(journal, 1)
    faults.before = lambda sql: order.append(sql.split()[0])

    async def chunks() -> AsyncIterator[bytes]:
        yield b"with the effects of"
        journal.append("s", b"this record")

    await journal.snapshot(1, chunks())
    assert order.index("INSERT") < order.index("UPDATE")
    assert (journal.durable_position, journal.snapshot_position) == (2, 1)
    await journal.close()


async def test_a_crash_at_any_moment_of_a_snapshot_keeps_the_state(memory_dir: Path) -> None:
    """Before it takes effect the old records count, afterwards the snapshot; there is no moment with neither."""
    faults = Faults()
    live = memory_dir / "live"
    journal = await opened(live, seams=faults.seams())
    made = [record.payload for record in await fill(journal, 5)]
    await journal.snapshot(5, chunked(made))
    made += [record.payload for record in await fill(journal, 5)]
    images: list[Path] = []

    def crash(*_: object) -> None:
        images.append(image(live, memory_dir / f"crash-{len(images)}"))

    async def chunks() -> AsyncIterator[bytes]:
        for payload in made:
            yield payload
            crash()

    faults.before = faults.after = crash
    await journal.snapshot(10, chunks())
    faults.heal()
    crash()
    await journal.close()
    positions = set()
    for crashed in images:
        journal = await opened(crashed)
        assert await _state(journal) == made
        positions.add(journal.snapshot_position)
        assert snapshots_in(crashed) == [f"snapshot-{journal.snapshot_position:020d}"]
        await journal.close()
    assert positions == {5, 10}
    assert len(images) > 15


async def test_power_loss_at_any_moment_of_a_snapshot_leaves_an_older_state(memory_dir: Path) -> None:
    """Under `os` it may take the whole WAL, and with it the new snapshot's name: the old one must still be there."""
    faults = Faults()
    live = memory_dir / "live"
    journal = await opened(live, seams=faults.seams())
    made = [record.payload for record in await fill(journal, 5)]
    await journal.snapshot(5, chunked(made))
    made += [record.payload for record in await fill(journal, 5)]
    images: list[Path] = []

    def power_loss(*_: object) -> None:
        lost = image(live, memory_dir / f"lost-{len(images)}")
        (lost / "journal.db-wal").unlink(missing_ok=True)
        images.append(lost)

    faults.before = faults.after = power_loss
    await journal.snapshot(10, chunked(made))
    faults.heal()
    power_loss()
    await journal.close()
    positions = set()
    for lost in images:
        journal = await opened(lost, seams=Seams(boot_id=lambda: b"another boot    "))
        assert await _state(journal) == made[: journal.position]
        assert journal.position + journal.lost == 10
        positions.add((journal.snapshot_position, journal.position))
        await journal.close()
    assert positions == {(5, 5), (10, 10)}


async def test_a_cancelled_snapshot_leaves_no_trace(tmp_path: Path) -> None:
    """A service that stops in the middle must neither lose records nor keep half a file."""
    journal = await opened(tmp_path)
    made = await fill(journal, 5)
    begun = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield bytes(2 << 20)
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(journal.snapshot(5, chunks()))
    await begun.wait()
    with pytest.raises(TurnoutError) as refused:
        await journal.snapshot(5, chunked([]))
    assert refused.value.reason == "SNAPSHOT_RUNNING"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await journal.close()
    assert snapshots_in(tmp_path) == []
    journal = await opened(tmp_path)
    assert await records_of(journal) == made
    await journal.snapshot(5, chunked([b"now"]))
    await journal.close()


async def test_a_source_that_fails_is_not_a_snapshot(tmp_path: Path) -> None:
    """Half a state published as a whole one would be read as the truth at the next start."""
    journal = await opened(tmp_path)
    made = await fill(journal, 3)

    async def chunks() -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("the owner's fault")

    with pytest.raises(RuntimeError, match="owner"):
        await journal.snapshot(3, chunks())
    assert journal.snapshot_position == 0
    assert await records_of(journal) == made
    await journal.close()


async def test_a_chunk_too_large_to_read_back_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written all the same, it would make the next start fail."""
    monkeypatch.setattr("services.runtime.journal.snapshot.MAX_CHUNK_BYTES", 10)
    journal = await opened(tmp_path)
    await fill(journal, 1)
    with pytest.raises(TurnoutError) as refused:
        await journal.snapshot(1, chunked([bytes(11)]))
    assert (refused.value.code, refused.value.metadata["value"]) == (Code.INVALID_ARGUMENT, "11")
    assert snapshots_in(tmp_path) == []
    await journal.snapshot(1, chunked([bytes(10)]))
    await journal.close()


@pytest.mark.parametrize("position", [0, 3, 6, -1])
async def test_a_snapshot_of_nothing_new_or_of_the_future_is_refused(tmp_path: Path, position: int) -> None:
    """One position back would bring deleted records into question, one ahead would skip records to come."""
    journal = await opened(tmp_path)
    await fill(journal, 3)
    await journal.snapshot(3, chunked([b"3"]))
    await fill(journal, 2)
    with pytest.raises(TurnoutError) as refused:
        await journal.snapshot(position, chunked([]))
    assert (refused.value.code, refused.value.reason) == (Code.OUT_OF_RANGE, "SNAPSHOT_POSITION")
    assert await snapshot_of(journal) == [b"3"]
    await journal.close()


async def test_a_replay_of_deleted_records_is_refused_not_shortened(tmp_path: Path) -> None:
    """A watcher that is too late must know that it missed something; this is not damage."""
    journal = await opened(tmp_path)
    await fill(journal, 6, 600 * KIB)
    replay = journal.replay()
    assert (await anext(replay)).position == 1
    await journal.snapshot(6, chunked([b"6"]))
    with pytest.raises(TurnoutError) as refused:
        async for _ in replay:
            pass
    assert (refused.value.code, refused.value.reason) == (Code.OUT_OF_RANGE, "JOURNAL_COMPACTED")
    with pytest.raises(TurnoutError) as refused:
        await records_of(journal, 2)
    assert refused.value.metadata["snapshot_position"] == "6"
    await journal.close()


async def test_a_reader_of_a_snapshot_keeps_it_while_another_takes_its_place(tmp_path: Path) -> None:
    """Whoever copies the state out must get all of one state."""
    journal = await opened(tmp_path)
    await fill(journal, 2)
    old = [b"a" * 900_000] * 4
    await journal.snapshot(1, chunked(old))
    reader = journal.read_snapshot()
    seen = [await anext(reader)]
    await journal.snapshot(2, chunked([b"new"]))
    seen += [chunk async for chunk in reader]
    assert seen == old
    assert await snapshot_of(journal) == [b"new"]
    await journal.close()


async def test_the_wal_stays_bounded_while_writers_and_readers_never_rest(tmp_path: Path) -> None:
    """Without a moment of silence, or with a reader that stays, a busy WAL grows until the disk is full."""
    limit = 128 * KIB
    journal = await opened(tmp_path, options(checkpoint_bytes=limit))
    wal = tmp_path / "journal.db-wal"
    largest = 0
    done = asyncio.Event()

    async def write() -> None:
        for _ in range(150):
            await journal.append("s", bytes(8 * KIB))

    async def read() -> None:
        while not done.is_set():
            async for _ in journal.replay():
                await asyncio.sleep(0)

    async def slow_reader() -> None:
        replay = journal.replay()
        await anext(replay)
        await done.wait()
        await replay.aclose()  # type: ignore[attr-defined]

    async def watch() -> None:
        nonlocal largest
        while not done.is_set():
            largest = max(largest, wal.stat().st_size)
            await asyncio.sleep(0.001)

    await fill(journal, 1)
    async with asyncio.TaskGroup() as tasks:
        for reader in (read(), slow_reader(), watch()):
            tasks.create_task(reader)
        await asyncio.gather(*(write() for _ in range(4)))
        done.set()
    assert journal.stats.log_bytes > 20 * limit
    assert largest < (WAL_BOUND + 1) * limit
    await journal.close()


async def test_commits_wait_for_a_checkpoint_that_falls_behind(tmp_path: Path) -> None:
    """A writer that never syncs is faster than the disk, and would fill it with WAL."""
    limit = 16 * KIB
    faults = Faults()
    go_on = threading.Event()
    journal = await opened(tmp_path, options(checkpoint_bytes=limit), seams=faults.seams())
    faults.before = lambda sql: _hold_on(sql, "PRAGMA wal_checkpoint", go_on)
    while journal.stats.wal_bytes < WAL_BOUND * limit:
        await fill(journal, 1, 4 * KIB)
    behind = asyncio.ensure_future(_position(journal.append("s", b"x")))
    done, _ = await asyncio.wait([behind], timeout=0.2)
    assert not done
    go_on.set()
    assert await behind == journal.durable_position
    await journal.close()


async def _position(durable: Durable) -> int:
    return await durable


def _hold_on(sql: str, statement: str, go_on: threading.Event) -> None:
    if sql.startswith(statement):
        assert go_on.wait(20)


async def test_space_of_deleted_batches_is_used_again(tmp_path: Path) -> None:
    """A file that grows by every compacted byte fills the disk within days."""
    journal = await opened(tmp_path)
    sizes = []
    for _ in range(6):
        await fill(journal, 40, 20 * KIB)
        await journal.snapshot(journal.position, chunked([b"state"]))
        sizes.append((tmp_path / "journal.db").stat().st_size)
    assert sizes[-1] <= 1.2 * sizes[0]
    await journal.close()


async def test_compaction_is_due_by_the_log_and_the_snapshot(tmp_path: Path) -> None:
    """A snapshot that is much larger than the log would be rewritten for every few records."""
    journal = await opened(tmp_path, options(compact_bytes=50 * KIB))
    await fill(journal, 1, 40 * KIB)
    assert not journal.compaction_due
    await fill(journal, 1, 40 * KIB)
    assert journal.compaction_due
    await journal.snapshot(2, chunked([bytes(240 * KIB)]))
    assert not journal.compaction_due
    assert journal.stats.log_bytes == 0
    await fill(journal, 2, 40 * KIB)
    assert not journal.compaction_due
    await fill(journal, 1, 41 * KIB)
    assert journal.compaction_due
    await journal.close()
    journal = await opened(tmp_path, options(compact_bytes=50 * KIB))
    assert journal.compaction_due
    await journal.close()


async def test_deletions_cut_short_are_finished_at_the_next_opening(tmp_path: Path) -> None:
    """Otherwise a crash after each snapshot leaves its old records for ever."""
    faults = Faults()
    journal = await opened(tmp_path, seams=faults.seams())
    await fill(journal, 5)
    faults.before = lambda sql: _raise_on(sql, "DELETE")
    with pytest.raises(TurnoutError):
        await journal.snapshot(4, chunked([b"1 to 4"]))
    faults.heal()
    await journal.reopen()
    assert journal.snapshot_position == 4
    assert [record.position for record in await records_of(journal)] == [5]
    await journal.close()
    assert (tmp_path / "journal.db").exists()
    journal = await opened(tmp_path)
    assert journal.stats.log_bytes < 300
    said = read_mark(tmp_path / "journal.mark")
    assert said is not None
    assert said.position == 5
    await journal.close()


def _raise_on(sql: str, statement: str) -> None:
    if sql.startswith(statement):
        raise sqlite_error(10)
