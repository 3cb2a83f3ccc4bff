"""Payload segments: what is kept, found again, and let go."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from google_crc32c import value

from services.buffer.segments.record import FILE_MAGIC, HEADER_BYTES
from services.buffer.segments.segment import Segment
from services.runtime.errors import Code, TurnoutError
from services.runtime.journal import Durability
from tests.buffer.segments.helpers import (
    KIB,
    MIB,
    SmallDisk,
    data_of,
    files,
    opened,
    put,
    read_all,
    small,
    upload,
)


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the store's own tasks run until `condition()` holds; the test's time limit ends it."""
    while not condition():  # noqa: ASYNC110 - the file system sends no event
        await asyncio.sleep(0.005)


async def refused(call: Awaitable[object], reason: str) -> TurnoutError:
    with pytest.raises(TurnoutError) as caught:
        await call
    assert caught.value.reason == reason
    return caught.value


@pytest.mark.parametrize("durability", [Durability.OS, Durability.FSYNC])
async def test_payloads_come_back_byte_for_byte_after_a_restart(tmp_path: Path, durability: Durability) -> None:
    """What a trainer samples after a restart must be what the worker sent."""
    sizes = {"empty": 0, "one": 1, "small": 5000, "part": MIB, "large": 3 * MIB + 17}
    options = small(durability=durability, segment_bytes=MIB)
    async with opened(tmp_path, options) as store:
        for number, (name, size) in enumerate(sizes.items()):
            if size <= 256 * KIB:
                put(store, name, data_of(number, size))
            await upload(store, f"up-{name}", data_of(number, size))
        assert await read_all(store, "up-large", sizes["large"]) == data_of(4, sizes["large"])
    assert len(files(tmp_path)) > 2
    names = ["empty", "one", "small", *(f"up-{name}" for name in sizes)]
    async with opened(tmp_path, options, keep=None) as store:
        assert store.retain(names) == []
        for number, (name, size) in enumerate(sizes.items()):
            for payload_id in {name, f"up-{name}"} & set(names):
                assert await read_all(store, payload_id, size) == data_of(number, size)
        assert (
            await read_all(store, "up-large", sizes["large"], start=MIB + 5, step=700)
            == data_of(4, sizes["large"])[MIB + 5 :]
        )


async def test_what_was_put_can_be_read_at_once_and_after_it_was_written(tmp_path: Path) -> None:
    """A worker may claim a prompt in the same turn of the loop in which it was added."""
    async with opened(tmp_path) as store:
        put(store, "p", b"prompt")
        assert await store.read("p", 0, 100) == b"prompt"
        await store.flush()
        assert await store.read("p", 2, 3) == b"omp"
        assert store.stats.in_flight_bytes == 0


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="Linux alone can read what is in memory and nothing else")
async def test_what_is_at_hand_is_what_a_read_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read on the event loop it must be the same bytes, as well verified, and never waited for."""
    sizes = {"one": 1, "组": 5000, "part": MIB, "large": 2 * MIB + 17}
    async with opened(tmp_path, small(segment_bytes=MIB)) as store:
        for number, (name, size) in enumerate(sizes.items()):
            await upload(store, name, data_of(number, size))
        put(store, "pending", b"not written yet")
        assert store.at_hand("pending", 4, 7) == b"written"
        assert store.at_hand("nope", 0, 1) is None
        for name, size in sizes.items():
            for offset in {0, size // 2, size - 1, min(size - 1, MIB + 3)}:
                for step in (1, 700, MIB):
                    assert store.at_hand(name, offset, step) == await store.read(name, offset, step)

        def not_in_memory(*_: object) -> int:
            raise BlockingIOError

        monkeypatch.setattr(os, "preadv", not_in_memory)
        assert store.at_hand("part", 0, MIB) is None, "what is on the disk alone is left to those who may wait"
        monkeypatch.setattr(os, "preadv", lambda *_: 5)
        assert store.at_hand("part", 0, MIB) is None, "so is what is there in part"
        monkeypatch.undo()
        first = bytearray(files(tmp_path)[0].read_bytes())
        first[len(FILE_MAGIC) + HEADER_BYTES + len("one")] ^= 1
        files(tmp_path)[0].write_bytes(first)
        with pytest.raises(TurnoutError) as caught:
            store.at_hand("one", 0, 1)
        assert caught.value.reason == "PAYLOAD_DAMAGED"


async def test_a_replayed_put_changes_nothing(tmp_path: Path) -> None:
    """A replay hands in the bytes of every record of the log again; writing them twice would fill the disk."""
    async with opened(tmp_path) as store:
        put(store, "p", b"first")
        put(store, "p", b"again")
        await store.flush()
    size = files(tmp_path)[0].stat().st_size
    async with opened(tmp_path, keep=None) as store:
        put(store, "p", b"first")
        store.retain(["p"])
        await store.flush()
        assert await store.read("p", 0, 9) == b"first"
    assert files(tmp_path)[0].stat().st_size == size


async def test_unknown_and_deleted_payloads_are_not_found(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await refused(store.read("nope", 0, 1), "PAYLOAD_NOT_FOUND")
        put(store, "p", b"x")
        store.delete("p")
        store.delete("p")
        await refused(store.read("p", 0, 1), "PAYLOAD_NOT_FOUND")


async def test_an_upload_is_nothing_until_it_is_finished(tmp_path: Path) -> None:
    """Half a payload must never be read, neither before the end nor after a crash in the middle."""
    async with opened(tmp_path) as store:
        half = store.upload("half")
        await half.write(data_of(1, 3 * MIB))
        await store.flush()
        await refused(store.read("half", 0, 1), "PAYLOAD_NOT_FOUND")
    async with opened(tmp_path, keep=None) as store:
        assert store.retain(["half"]) == ["half"]
        await refused(store.read("half", 0, 1), "PAYLOAD_DAMAGED")


@pytest.mark.parametrize("durability", [Durability.OS, Durability.FSYNC])
async def test_an_upload_is_finished_when_its_own_bytes_are_written_and_not_when_others_were_dropped(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was handed in behind it and deleted at once is passed over at once, while it is still being written."""
    slow = asyncio.Event()
    append = Segment.append
    loop = asyncio.get_running_loop()

    def held(segment: Segment, buffers: Sequence[bytes]) -> int:
        asyncio.run_coroutine_threadsafe(slow.wait(), loop).result()
        return append(segment, buffers)

    async with opened(tmp_path, small(durability=durability)) as store:
        monkeypatch.setattr(Segment, "append", held)
        taking = store.upload("whole")
        await taking.write(data_of(1, 5000))
        finishing = asyncio.create_task(taking.finish())
        await asyncio.sleep(0)
        for number in range(5):
            put(store, f"short-{number}", data_of(number, 600))
            store.delete(f"short-{number}")
        await asyncio.sleep(0.1)
        assert not finishing.done()
        slow.set()
        await finishing
        assert await read_all(store, "whole", 5000) == data_of(1, 5000)
        assert store.stats.in_flight_bytes == 0


async def test_an_aborted_upload_leaves_no_bytes(tmp_path: Path) -> None:
    """Workers that die while uploading would fill the disk."""
    async with opened(tmp_path) as store:
        for number in range(5):
            taking = store.upload(f"u{number}")
            await taking.write(data_of(number, 2 * MIB))
            if number % 2:
                await store.flush()
            taking.abort()
        await eventually(lambda: not files(tmp_path))
        assert store.stats.live_bytes == 0


async def test_an_upload_of_a_gigabyte_never_needs_it_in_memory(tmp_path: Path) -> None:
    """The bound on bytes in flight is what stands between many uploads and the memory killer."""
    async with opened(tmp_path, small(in_flight_bytes=2 * MIB, segment_bytes=64 * MIB)) as store:
        chunk = bytes(MIB)
        taking = store.upload("large")
        worst = 0
        for _ in range(64):
            await taking.write(chunk)
            worst = max(worst, store.stats.in_flight_bytes)
        await taking.finish()
        assert worst <= 3 * MIB


async def test_segments_go_when_all_of_their_payloads_are_gone(tmp_path: Path) -> None:
    """The disk would fill with what was consumed long ago."""
    async with opened(tmp_path) as store:
        for number in range(64):
            put(store, f"p{number}", data_of(number, 8 * KIB))
        await store.flush()
        assert len(files(tmp_path)) > 4
        for number in range(63):
            store.delete(f"p{number}")
        await eventually(lambda: len(files(tmp_path)) == 1)
        assert await store.read("p63", 0, 8 * KIB) == data_of(63, 8 * KIB)


async def test_bytes_leave_the_disk_only_after_their_deletion_is_durable(tmp_path: Path) -> None:
    """A crash between the removal and the record of the commit would bring a group back without its bytes."""
    durable, asked = asyncio.Event(), asyncio.Event()

    async def settled() -> None:
        asked.set()
        await durable.wait()

    async with opened(tmp_path, settled=settled) as store:
        put(store, "p", data_of(1, 80 * KIB))
        await store.flush()
        store.delete("p")
        await asked.wait()
        assert len(files(tmp_path)) == 1
        durable.set()
        await eventually(lambda: not files(tmp_path))


async def test_nothing_is_removed_while_decisions_are_replayed(tmp_path: Path) -> None:
    """Deletions of a log whose end is still unread must not touch the disk."""
    async with opened(tmp_path) as store:
        put(store, "p", data_of(1, 80 * KIB))
    async with opened(tmp_path, keep=None) as store:
        store.delete("p")
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(files(tmp_path)) == 1
        store.retain([])
        await eventually(lambda: not files(tmp_path))


async def test_what_nothing_names_after_a_replay_goes(tmp_path: Path) -> None:
    """An upload that was never named, because the process died first, would stay for ever."""
    async with opened(tmp_path) as store:
        await upload(store, "orphan", data_of(1, 80 * KIB))
        put(store, "kept", b"kept")
    async with opened(tmp_path, keep=None) as store:
        assert store.retain(["kept", "never"]) == ["never"]
        await refused(store.read("orphan", 0, 1), "PAYLOAD_NOT_FOUND")
        assert await store.read("kept", 0, 9) == b"kept"
        await eventually(lambda: store.stats.segments == 1)


async def test_mostly_dead_segments_are_copied_together(tmp_path: Path) -> None:
    """One long-lived payload in each segment would keep a disk full of dead ones."""
    async with opened(tmp_path, small(segment_bytes=256 * KIB)) as store:
        for number in range(320):
            put(store, f"p{number}", data_of(number, 8 * KIB))
        await upload(store, "large", data_of(7, 2 * MIB))
        await store.flush()
        before = len(files(tmp_path))
        kept = [number for number in range(320) if number % 32 == 5]
        for number in range(320):
            if number not in kept:
                store.delete(f"p{number}")
        await eventually(lambda: len(files(tmp_path)) <= before - 8)
        for number in kept:
            assert await store.read(f"p{number}", 0, 8 * KIB) == data_of(number, 8 * KIB)
    async with opened(tmp_path, keep=None) as store:
        assert store.retain([*(f"p{number}" for number in kept), "large"]) == []
        for number in kept:
            assert await store.read(f"p{number}", 0, 8 * KIB) == data_of(number, 8 * KIB)
        assert await read_all(store, "large", 2 * MIB) == data_of(7, 2 * MIB)


async def test_a_payload_deleted_while_it_is_copied_stays_deleted(tmp_path: Path) -> None:
    """The copy would come to life as a payload that nobody can name."""
    async with opened(tmp_path, small(segment_bytes=256 * KIB)) as store:
        for number in range(64):
            put(store, f"p{number}", data_of(number, 8 * KIB))
        await store.flush()
        for number in range(64):
            if number % 32 != 5:
                store.delete(f"p{number}")
        await asyncio.sleep(0)
        store.delete("p5")
        store.delete("p37")
        await eventually(lambda: store.stats.live_bytes == 0)
        assert store.stats.payloads == 0


async def test_a_torn_end_is_cut_and_appending_goes_on(tmp_path: Path) -> None:
    """A crash in the middle of a write leaves half a record, which must neither be read nor hide later ones."""
    async with opened(tmp_path) as store:
        put(store, "whole", b"whole")
        put(store, "torn", data_of(1, 5000))
        await store.flush()
    (path,) = files(tmp_path)
    for cut in (1, 4999, 5010):
        os.truncate(path, path.stat().st_size - cut if cut == 1 else path.stat().st_size - 1)
        async with opened(tmp_path, keep=None) as store:
            assert store.retain(["whole", "torn"]) == ["torn"]
            assert await store.read("whole", 0, 9) == b"whole"
            put(store, "torn", data_of(1, 5000))
            await store.flush()
            assert await store.read("torn", 0, 9000) == data_of(1, 5000)
    async with opened(tmp_path, keep=None) as store:
        assert store.retain(["whole", "torn"]) == []


async def test_damage_in_the_middle_costs_the_payload_that_it_hit(tmp_path: Path) -> None:
    """One bad sector must not take a run's buffer with it, nor pass bad bytes on."""
    async with opened(tmp_path, small(segment_bytes=8 * MIB)) as store:
        for number in range(10):
            put(store, f"p{number}", data_of(number, 10 * KIB))
        await upload(store, "last", data_of(11, 9 * MIB))
    path = files(tmp_path)[0]
    content = bytearray(path.read_bytes())
    data, header = content.find(b"4:00000000"), content.find(b"TNPR", content.find(b"6:00000000"))
    content[data + 50] ^= 1
    content[header + 9] ^= 1
    path.write_bytes(content)
    async with opened(tmp_path, small(segment_bytes=8 * MIB), keep=None) as store:
        lost = store.retain([*(f"p{number}" for number in range(10)), "last"])
        assert lost == ["p7"]
        for number in range(10):
            reading = store.read(f"p{number}", 0, 10 * KIB)
            if number in (4, 7):
                error = await refused(reading, "PAYLOAD_DAMAGED")
                assert error.code is Code.DATA_LOSS
                assert error.metadata["value"] == f"p{number}"
            else:
                assert await reading == data_of(number, 10 * KIB)
        assert await read_all(store, "last", 9 * MIB) == data_of(11, 9 * MIB)


async def test_damaged_bytes_are_not_copied_as_if_they_were_right(tmp_path: Path) -> None:
    """Compaction must not give damage a fresh record, nor try the same segment for ever."""
    async with opened(tmp_path, small(segment_bytes=256 * KIB)) as store:
        for number in range(40):
            put(store, f"p{number}", data_of(number, 8 * KIB))
        await store.flush()
        path = files(tmp_path)[0]
        content = bytearray(path.read_bytes())
        content[content.find(b"5:00000000") + 50] ^= 1
        path.write_bytes(content)
        for number in range(32):
            if number not in (5, 6):
                store.delete(f"p{number}")
        await eventually(lambda: store.stats.live_bytes < 12 * 9 * KIB)
        assert await store.read("p6", 0, 8 * KIB) == data_of(6, 8 * KIB)
        await refused(store.read("p5", 0, 8 * KIB), "PAYLOAD_DAMAGED")


async def test_a_full_disk_refuses_uploads_and_keeps_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an upload on a full disk would take the space that deletes give back."""
    disk = SmallDisk(monkeypatch, tmp_path, 12 * MIB)
    async with opened(tmp_path, small(segment_bytes=4 * MIB)) as store:
        await upload(store, "kept", data_of(1, 6 * MIB))
        error = await refused(upload(store, "refused", data_of(2, 20 * MIB)), "DISK_FULL")
        assert error.code is Code.RESOURCE_EXHAUSTED
        await refused(store.room(), "DISK_FULL")
        assert await read_all(store, "kept", 6 * MIB) == data_of(1, 6 * MIB)
        assert disk.free >= 0
        store.delete("kept")
        await eventually(lambda: not store.stats.full)
        await upload(store, "again", data_of(3, 3 * MIB))
        assert await read_all(store, "again", 3 * MIB) == data_of(3, 3 * MIB)


async def test_what_was_acknowledged_is_written_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inline bytes are in the journal already, so that a full disk must not lose them from the store."""
    disk = SmallDisk(monkeypatch, tmp_path, 100 * KIB)
    async with opened(tmp_path) as store:
        put(store, "p", data_of(1, 90 * KIB))
        await store.flush()
        put(store, "q", data_of(2, 90 * KIB))
        await eventually(lambda: store.stats.full)
        await refused(store.flush(), "DISK_FULL")
        assert await store.read("q", 0, MIB) == data_of(2, 90 * KIB)
        disk.limit = 20 * MIB
        await eventually(lambda: not store.stats.full)
        await store.flush()
    async with opened(tmp_path, keep=None) as store:
        assert store.retain(["p", "q"]) == []


async def test_a_segment_that_began_on_a_full_disk_is_found_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose first bytes had no room was written without them, and held nothing for the process that came after."""
    disk = SmallDisk(monkeypatch, tmp_path, 0)
    async with opened(tmp_path) as store:
        put(store, "p", data_of(1, 90 * KIB))
        await eventually(lambda: store.stats.full)
        disk.limit = 20 * MIB
        await eventually(lambda: not store.stats.full)
        await store.flush()
        assert await store.read("p", 0, MIB) == data_of(1, 90 * KIB)
    async with opened(tmp_path, keep=None) as store:
        assert store.retain(["p"]) == []
        assert await store.read("p", 0, MIB) == data_of(1, 90 * KIB)


async def test_a_ballast_lets_owed_bytes_through_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits and the compaction that frees space need some space themselves."""
    SmallDisk(monkeypatch, tmp_path, 12 * MIB)
    async with opened(tmp_path, small(ballast_bytes=2 * MIB)) as store:
        assert (tmp_path / "ballast").stat().st_size == 2 * MIB
        filling = store.upload("filling")

        async def fill() -> None:
            while True:
                await filling.write(bytes(MIB))

        await refused(fill(), "DISK_FULL")
        put(store, "owed", data_of(1, 200 * KIB))
        await eventually(lambda: store.stats.in_flight_bytes == 0)
        assert await store.read("owed", 0, MIB) == data_of(1, 200 * KIB)
        await refused(store.room(), "DISK_FULL")
        filling.abort()
        await eventually(lambda: not store.stats.full)


async def test_a_failed_sync_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed fsync the kernel forgets what was not written; going on would acknowledge lost bytes."""
    told: list[TurnoutError] = []

    def broken(segment: Segment) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Segment, "sync", broken)
    async with opened(tmp_path, small(durability=Durability.FSYNC), on_fatal=told.append) as store:
        await refused(upload(store, "u", b"bytes"), "PAYLOAD_FSYNC_FAILED")
        await refused(store.room(), "PAYLOAD_FSYNC_FAILED")
        assert [error.reason for error in told] == ["PAYLOAD_FSYNC_FAILED"]


async def test_the_read_cache_stays_within_its_bound(tmp_path: Path) -> None:
    """`--payload-memory` is a promise about the memory of the process."""
    async with opened(tmp_path, small(memory_bytes=100 * KIB)) as store:
        for number in range(50):
            put(store, f"p{number}", data_of(number, 8 * KIB))
        await store.flush()
        for number in range(50):
            assert await store.read(f"p{number}", 0, 8 * KIB) == data_of(number, 8 * KIB)
            assert store.stats.cached_bytes <= 100 * KIB
        assert store.stats.cached_bytes > 50 * KIB
        store.delete("p49")
        await refused(store.read("p49", 0, 1), "PAYLOAD_NOT_FOUND")


async def test_kill_9_at_any_moment_loses_no_acknowledged_upload(tmp_path: Path) -> None:
    """An acknowledged upload is what a worker deletes its own copy after."""
    for delay in (0.05, 0.11, 0.23):
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs here
            [sys.executable, "-P", str(Path(__file__).with_name("uploader.py")), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        with process:
            assert process.stdout is not None
            acknowledged = [process.stdout.readline().split()]
            time.sleep(delay)  # noqa: ASYNC251 - a moment that nothing announces is what is tested
            process.kill()
            acknowledged += [line.split() for line in process.stdout.read().splitlines(keepends=True) if "\n" in line]
        names = [name for name, _ in acknowledged]
        async with opened(tmp_path, keep=None) as store:
            assert store.retain(names) == []
            for name, crc in acknowledged:
                data = await read_all(store, name, 300 * KIB)
                assert value(data) == int(crc)
