"""Handing in records and learning that they are durable."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.runtime.errors import TurnoutError
from services.runtime.journal import Durability, Durable, JournalState, Record
from services.runtime.journal.at_once import AT_ONCE_BYTES, AWAY, SLOW_S
from services.runtime.journal.meta import Connection, connect_sqlite
from services.runtime.journal.opening import Seams
from tests.runtime.journal.helpers import Faults, chunked, opened, options, records_of, snapshot_of

LEVELS = [Durability.FSYNC, Durability.OS]
CALLERS = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=30), st.integers(0, 2)), max_size=8), max_size=6
)


@given(callers=CALLERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_records_of_concurrent_callers_keep_the_order_of_their_positions(
    memory_dir: Path, callers: list[list[tuple[str, bytes, int]]]
) -> None:
    """What a service applied in one order must not be replayed in another, however commits cut the records."""

    directory = memory_dir / str(len(list(memory_dir.iterdir())))

    async def run() -> None:
        journal = await opened(directory)
        handed_in: list[Record] = []
        told: list[int] = []

        async def caller(records: list[tuple[str, bytes, int]]) -> None:
            for stream, payload, turns in records:
                durable = journal.append(stream, payload)
                handed_in.append(Record(durable.position, stream, payload))
                durable.add_done_callback(lambda done: told.append(done.position))
                for _ in range(turns):
                    await asyncio.sleep(0)
                if turns:
                    assert await durable == durable.position
                    assert journal.durable_position >= durable.position

        await asyncio.gather(*(caller(records) for records in callers))
        await journal.tail()
        await asyncio.sleep(0)
        assert [record.position for record in handed_in] == list(range(1, len(handed_in) + 1))
        assert told == sorted(told)
        assert len(told) == len(handed_in)
        assert await records_of(journal) == handed_in
        await journal.close()
        journal = await opened(directory)
        assert await records_of(journal) == handed_in
        await journal.close()

    asyncio.run(run())


@pytest.mark.parametrize("level", LEVELS)
async def test_a_record_is_in_the_file_when_its_promise_is_kept(tmp_path: Path, level: Durability) -> None:
    """An answer that leaves before its record is stored is lost by the next kill -9."""
    journal = await opened(tmp_path, options(level))
    durable = journal.append("run", b"payload")
    assert not durable.done()
    await durable
    with closing(sqlite3.connect(tmp_path / "journal.db")) as reader:
        assert reader.execute("SELECT first, count FROM batches").fetchall() == [(1, 1)]
    assert durable.done()
    assert durable.error() is None
    await journal.close()


@pytest.mark.parametrize(("level", "synchronous"), [(Durability.FSYNC, 2), (Durability.OS, 1)])
async def test_every_connection_syncs_as_its_level_asks(tmp_path: Path, level: Durability, synchronous: int) -> None:
    """The setting belongs to a connection, and SQLite's default differs between builds."""
    connections: list[Connection] = []

    def connect(path: Path, mode: str) -> Connection:
        connections.append(connect_sqlite(path, mode))
        return connections[-1]

    journal = await opened(tmp_path, options(level), seams=Seams(connect=connect))
    assert len(connections) > 3
    for connection in connections[-3:]:
        assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
        assert connection.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    await journal.close()


async def test_what_comes_while_a_commit_is_under_way_goes_into_the_next_one(tmp_path: Path) -> None:
    """A commit for each record would cap the service at the disk's syncs a second."""
    faults = Faults()
    busy, go_on = threading.Event(), threading.Event()

    def hold(sql: str) -> None:
        if sql.startswith("INSERT INTO batches"):
            busy.set()
            assert go_on.wait(20)

    journal = await opened(tmp_path, options(Durability.FSYNC), seams=faults.seams())
    faults.before = hold
    first = journal.append("s", b"1")
    await asyncio.to_thread(busy.wait, 20)
    rest = []
    for number in range(2, 50):
        rest.append(journal.append("s", b"%d" % number))
        await asyncio.sleep(0)
    assert not first.done()
    assert journal.stats.pending_records == 49
    go_on.set()
    await rest[-1]
    assert all(durable.done() for durable in [first, *rest])
    assert (journal.stats.records, journal.stats.commits) == (49, 2)
    await journal.close()


async def test_records_of_one_turn_share_a_commit(tmp_path: Path) -> None:
    """A call that changes several things is never half stored after a crash."""
    journal = await opened(tmp_path)
    big = [journal.append("s", bytes(3 << 20)) for _ in range(4)]
    await big[0]
    assert all(durable.done() for durable in big)
    assert journal.stats.commits == 1
    await journal.close()


async def test_the_loop_is_woken_once_per_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up per record costs more than the record, at thousands a second."""
    journal = await opened(tmp_path, options(Durability.FSYNC))
    wakes = 0
    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe

    def counted(*arguments: object) -> object:
        nonlocal wakes
        wakes += 1
        return wake(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    await asyncio.gather(*(_await(journal.append("s", b"x")) for _ in range(200)))
    assert wakes == journal.stats.commits == 1
    monkeypatch.undo()
    await journal.close()


async def _await(durable: Durable) -> int:
    return await durable


def _inserting_threads(faults: Faults, slow_s: float = 0.0) -> list[int]:
    """The threads that commits happen on, each of which takes `slow_s`."""
    threads: list[int] = []

    def note(sql: str) -> None:
        if sql.startswith("INSERT INTO batches"):
            threads.append(threading.get_ident())
            time.sleep(slow_s)

    faults.before = note
    return threads


@pytest.mark.parametrize(("level", "here"), [(Durability.OS, True), (Durability.FSYNC, False)])
async def test_a_small_commit_is_made_on_the_loop_if_it_is_but_a_copy(
    tmp_path: Path, level: Durability, here: bool
) -> None:
    """Handed to a thread and back it takes ten times as long; a sync there would stop every other call."""
    faults = Faults()
    journal = await opened(tmp_path, options(level), seams=faults.seams())
    threads = _inserting_threads(faults)
    # Not every one, since on a busy machine a copy may be slow, too.
    for _ in range(20):
        await journal.append("s", b"x")
        await asyncio.sleep(0.01)
    assert (threading.get_ident() in threads) == here
    await journal.close()


async def test_commits_keep_off_the_loop_when_they_are_large_or_slow_or_others_wait(tmp_path: Path) -> None:
    """The kernel makes writers wait for a disk that is behind; and what was handed in first is stored first."""
    faults = Faults()
    journal = await opened(tmp_path, seams=faults.seams())
    threads = _inserting_threads(faults)
    here = threading.get_ident()
    large = journal.append("s", bytes(AT_ONCE_BYTES + 1))
    await asyncio.sleep(0)
    behind = journal.append("s", b"behind the large one")
    await behind
    assert large.done()
    assert here not in threads
    threads = _inserting_threads(faults, slow_s=2 * SLOW_S)
    await journal.append("s", b"slow")
    assert threads == [here]
    threads = _inserting_threads(faults)
    await journal.append("s", b"after it")
    assert here not in threads
    while here not in threads:
        await asyncio.sleep(AWAY * SLOW_S)
        await journal.append("s", b"later")
    assert [record.position for record in await records_of(journal)] == list(range(1, journal.position + 1))
    await journal.close()


async def test_a_checkpoint_does_not_stop_the_loop(tmp_path: Path) -> None:
    """It syncs while it holds the writer, which takes as long as the disk likes."""
    faults = Faults()
    go_on = threading.Event()
    checkpointing = threading.Event()

    def hold(sql: str) -> None:
        if sql.startswith("PRAGMA wal_checkpoint(RESTART)"):
            checkpointing.set()
            assert go_on.wait(20)

    journal = await opened(tmp_path, options(checkpoint_bytes=64 << 10), seams=faults.seams())
    faults.before = hold
    while not checkpointing.is_set():
        journal.append("s", bytes(4 << 10))
        await asyncio.sleep(0.001)
    waiting = journal.append("s", b"x")
    await asyncio.sleep(0.05)
    assert not waiting.done()
    go_on.set()
    await waiting
    await journal.close()


async def test_a_cancelled_caller_leaves_the_others_their_promise(tmp_path: Path) -> None:
    """With one future for all, a client that hangs up would cancel every call in the same commit."""
    journal = await opened(tmp_path, options(Durability.FSYNC))
    durables = [journal.append("s", b"x") for _ in range(3)]
    tasks = [asyncio.create_task(_await(durable)) for durable in durables]
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert await tasks[0] == 1
    assert await tasks[2] == 3
    assert tasks[1].cancelled()
    assert len(await records_of(journal)) == 3
    await journal.close()


async def test_a_promise_may_be_asked_late_and_often(tmp_path: Path) -> None:
    """Callers that come after the commit must neither hang nor miss their callback."""
    journal = await opened(tmp_path)
    durable = journal.append("s", b"x")
    assert await durable == 1
    assert await durable == 1
    told = asyncio.Event()
    durable.add_done_callback(lambda done: told.set())
    await told.wait()
    assert await journal.tail() == 1
    await journal.close()


async def test_the_tail_covers_all_that_was_handed_in(tmp_path: Path) -> None:
    """A reader that answers from memory must not show what a crash could still take back."""
    journal = await opened(tmp_path)
    assert await journal.tail() == 0
    for _ in range(5):
        journal.append("s", b"x")
    tail = journal.tail()
    assert not tail.done()
    assert await tail == 5
    assert journal.durable_position == 5
    await journal.close()


async def test_replay_chooses_streams_and_a_start(tmp_path: Path) -> None:
    """A watcher of one run from some position must get exactly its own, also when a batch begins before it."""
    journal = await opened(tmp_path)
    for number in range(20):
        journal.append(f"run-{number % 2}", b"%d" % number)  # one batch
    await journal.tail()
    assert [record.position async for record in journal.replay(7, {"run-1"})] == [8, 10, 12, 14, 16, 18, 20]
    assert await records_of(journal, 20) == []
    assert await records_of(journal, 100) == []
    await journal.close()


async def test_replay_ends_at_what_was_durable_when_it_was_called(tmp_path: Path) -> None:
    """A replay that chases the writer never ends; the caller follows live from there."""
    journal = await opened(tmp_path)
    await journal.append("s", b"1")
    seen = []
    async for record in journal.replay():
        seen.append(record.position)
        await journal.append("s", b"more")
    assert seen == [1]
    await journal.close()


async def test_a_refused_record_takes_no_position(tmp_path: Path) -> None:
    """A gap in the positions would read as damage."""
    journal = await opened(tmp_path)
    with pytest.raises(TurnoutError):
        journal.append("", b"x")
    assert await journal.append("s", b"x") == 1
    await journal.close()


async def test_close_makes_everything_durable_and_then_refuses(tmp_path: Path) -> None:
    """A graceful stop loses nothing that was handed in, and leaves no WAL behind."""
    journal = await opened(tmp_path)
    durables = [journal.append("s", b"%d" % number) for number in range(10)]
    await journal.close()
    assert all(durable.done() and durable.error() is None for durable in durables)
    assert not (tmp_path / "journal.db-wal").exists()
    with pytest.raises(TurnoutError) as refused:
        journal.append("s", b"late")
    assert refused.value.reason == "JOURNAL_CLOSED"
    assert (await journal.failed()).error.reason == "JOURNAL_CLOSED"
    await journal.close()


async def test_durability_none_keeps_nothing(tmp_path: Path) -> None:
    """It must not touch the disk, and its promises must not make anybody wait."""
    journal = await opened(tmp_path / "none", options(Durability.NONE))
    durable = journal.append("s", b"x")
    assert durable.done()
    assert await durable == journal.durable_position == 1
    assert await records_of(journal) == []
    await journal.snapshot(1, chunked([b"x"]))
    assert (await snapshot_of(journal), journal.snapshot_position) == ([], 0)
    assert await journal.tail() == journal.stats.records == 1
    assert not await journal.take_ballast()
    assert not await journal.give_back_ballast()
    with pytest.raises(TurnoutError) as refused:
        await journal.reopen()
    assert refused.value.reason == "JOURNAL_NOT_FAILED"
    assert journal.state is JournalState.OPEN
    await journal.close()
    assert (await journal.failed()).error.reason == "JOURNAL_CLOSED"
    assert not (tmp_path / "none").exists()
    with pytest.raises(TurnoutError, match="closed"):
        journal.append("s", b"x")


async def test_durability_none_does_not_pass_over_stored_records(tmp_path: Path) -> None:
    """The next start with a journal would bring back a state that has long gone stale."""
    journal = await opened(tmp_path)
    await journal.append("s", b"x")
    await journal.close()
    with pytest.raises(TurnoutError) as refused:
        await opened(tmp_path, options(Durability.NONE))
    assert refused.value.reason == "JOURNAL_PRESENT"
