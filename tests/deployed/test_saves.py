"""H10: a deployed buffer that is killed while it saves, and one whose disk is full."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import google_crc32c
import grpc.aio
import pytest

from services.runtime.errors import Code, TurnoutError
from services.runtime.statuses import from_rpc_error
from tests.buffer.helpers import Caller, output, refused, result
from tests.deployed.site import Member, Site
from turnout.buffer.v1 import buffer_pb2 as pb

pytestmark = [pytest.mark.slow]

KILLS = 50
GROUPS, GROUP_BYTES = 20, 10 << 20
"""200 MB."""

CALL_S = 120.0
"""For calls that move so much, on a machine with other things to do."""


async def fill(caller: Caller, groups: int, size: int, *, first: int = 0) -> None:
    data = os.urandom(size)
    crc = google_crc32c.value(data)
    for number in range(first, first + groups):
        made = output(1.0)
        made.payload.ref.CopyFrom((await caller.put(data, crc)).ref)
        await caller.add(f"g{number}")
        await caller.finish(result(f"g{number}", 0, made))


def saves(buffer: Member) -> list[Path]:
    """The files of complete saves, newest first."""
    assert buffer.data_dir is not None
    found = buffer.data_dir.glob("checkpoints/*/*.ckpt")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def unfinished(buffer: Member) -> list[Path]:
    assert buffer.data_dir is not None
    return list(buffer.data_dir.rglob("*.part"))


async def restore(caller: Caller, checkpoint_id: str) -> pb.RestoreResponse:
    request = pb.RestoreRequest(run_id=caller.run_id, checkpoint_id=checkpoint_id)
    return await caller.stub.Restore(request, timeout=CALL_S)


@pytest.mark.timeout(1500)
async def test_h10_fifty_kills_during_a_save_of_two_hundred_megabytes(site: Site) -> None:
    """Every start lists the newest complete save, every save that was answered is among them, and it comes back whole.

    The kill comes 0 to 400 ms after the call. Older saves are deleted to spare the disk, so two are there at a time.
    """
    rng = random.Random(10)
    buffer = site.start("buffer").members["buffer"]
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create()
        await fill(caller, GROUPS, GROUP_BYTES)
        request = pb.CheckpointRequest(run_id=caller.run_id, checkpoint_id="first")
        await caller.stub.Checkpoint(request, timeout=CALL_S)
    answered = {"first"}
    completed = 0
    for life in range(KILLS):
        async with site.channel(buffer.target) as channel:
            caller = Caller(channel)
            request = pb.CheckpointRequest(run_id=caller.run_id, checkpoint_id=f"life-{life}")
            saving = asyncio.ensure_future(caller.stub.Checkpoint(request, timeout=CALL_S))
            await asyncio.wait({saving}, timeout=rng.uniform(0.0, 0.4))
            buffer.kill()
            with suppress(grpc.aio.AioRpcError):
                await saving
                answered.add(f"life-{life}")
        buffer.start()
        assert not unfinished(buffer), "a start sweeps what a crash left"
        async with site.channel(buffer.target) as channel:
            caller = Caller(channel)
            ids = [info.checkpoint_id for info in await caller.checkpoints()]
            assert answered <= set(ids)
            completed += f"life-{life}" in ids
            assert (await restore(caller, ids[0])).counts.finished == GROUPS
            for old in ids[2:]:
                await caller.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(run_id=caller.run_id, checkpoint_id=old))
            answered = {one for one in answered if one in ids[:2]}
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        verify = pb.VerifyCheckpointRequest(run_id=caller.run_id, checkpoint_id=ids[0])
        answer = await caller.stub.VerifyCheckpoint(verify, timeout=CALL_S)
        assert answer.checkpoint.counts.finished == GROUPS
    print(f"{completed} of {KILLS} saves were complete when the process was killed")
    assert completed < KILLS, "none was killed in the middle"


@pytest.mark.timeout(180)
async def test_h10_damaged_missing_stray_and_concurrent_saves(site: Site) -> None:
    """What a person finds after a bad night: a file cut by a byte, one that is gone, a left-over, two saves at once."""
    buffer = site.start("buffer").members["buffer"]
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create()
        await fill(caller, 10, 1 << 20)
        both = await asyncio.gather(caller.checkpoint("a"), caller.checkpoint("a"), caller.checkpoint("b"))
        assert both[0].checkpoint == both[1].checkpoint
        assert (await refused(caller.checkpoint("a", step=7))).reason == "CHECKPOINT_EXISTS"
        newest = saves(buffer)[0]
        stray = newest.with_suffix(".part")
        stray.write_bytes(b"half a save")
        os.truncate(newest, newest.stat().st_size - 1)
    buffer.kill()
    buffer.start()
    assert not stray.exists()
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        (whole,) = [info.checkpoint_id for info in await caller.checkpoints()]
        (cut,) = {"a", "b"} - {whole}
        error = await refused(caller.restore(cut))
        assert (error.code, error.reason) == (Code.DATA_LOSS, "CHECKPOINT_DAMAGED")
        assert (await refused(caller.restore("never made"))).code is Code.NOT_FOUND
        assert (await caller.restore(whole)).counts.finished == 10


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[None]:
    """A file system of this size at `path`."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    if os.getuid() != 0 or not shutil.which("mount"):
        pytest.skip("only root can mount a small disk")
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.timeout(180)
async def test_h10_a_full_disk_refuses_the_save_and_keeps_the_one_before(site: Site) -> None:
    """RESOURCE_EXHAUSTED, also for what else needs space; then room comes, and it goes on by itself."""
    buffer = site.member("buffer")
    assert buffer.data_dir is not None
    with small_disk(buffer.data_dir, 300):
        buffer.start()
        async with site.channel(buffer.target) as channel:
            caller = Caller(channel)
            await caller.create()
            await fill(caller, 20, 1 << 20)
            await caller.checkpoint("old")
            filling = buffer.data_dir / "of somebody else"
            with suppress(OSError), filling.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            error = await refused(caller.checkpoint("new"))
            assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "DISK_FULL")
            assert (await _put_until_refused(caller)).reason == "DISK_FULL"
            assert [info.checkpoint_id for info in await caller.checkpoints()] == ["old"]
            assert not unfinished(buffer)
            assert (await caller.verify("old")).counts.finished == 20
            # What frees space goes on.
            assert len(await caller.take(5)) == 5
            filling.unlink()
            # It takes its reserve back within a second or so, and then all that needs space.
            async with asyncio.timeout(60):
                while True:
                    with suppress(grpc.aio.AioRpcError):
                        await caller.checkpoint("new")
                        assert (await caller.restore("old")).counts.finished == 20
                        break
                    await asyncio.sleep(0.2)
        assert buffer.stop() == 0
        buffer.start()
        async with site.channel(buffer.target) as channel:
            assert (await Caller(channel).depth()).sampleable == 20
        buffer.kill()


async def _put_until_refused(caller: Caller) -> TurnoutError:
    """The first uploads may still find room: that of the save which failed, and of the reserve once."""
    data = bytes(1 << 20)
    crc = google_crc32c.value(data)
    for _ in range(100):
        try:
            await caller.put(data, crc)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
    raise AssertionError("a full disk took a hundred megabytes")
