"""Cases of checkpoints, caps, restarts and background loops: H07 to H10, H23, H50, H57, H60."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import grpc.aio
import pytest
from structlog.testing import capture_logs

from services.buffer.desk import Desk
from services.buffer.storage import checkpoint_file
from services.buffer.storage.keeper import Keeper
from services.runtime.errors import Code
from services.runtime.journal.sqlite import SqliteJournal
from services.runtime.tasks import LoopStatus
from tests.buffer.helpers import Buffer, Caller, output, refused, refused_stream, result, running_buffer, seconds
from tests.buffer.process import buffer_process, start
from turnout.buffer.v1 import buffer_pb2 as pb


def unfinished(directory: Path) -> list[Path]:
    """Files of saves that did not come to their end."""
    return list(directory.rglob("*.part"))


def newest_save(directory: Path) -> Path:
    """The file that was written last."""
    return max(directory.glob("checkpoints/*/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


async def prompts(caller: Caller) -> dict[str, bytes]:
    """Claim everything that is pending; the prompts by group."""
    claims = await caller.claim(1000)
    return {claim.group_id: claim.prompt.inline for claim in claims}


async def test_h07_checkpoint_keeps_pending_running_and_finished_groups(tmp_path: Path) -> None:
    """A checkpoint that only knew the data cursor lost every prompt between it and the trainer."""
    data = b"\x00\xff" * 500
    async with buffer_process(tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=1)
        await caller.open()
        for number in range(8):
            await caller.add(f"g{number}", step=1, prompt=b"prompt %d" % number)
        claims = await caller.claim(6)
        for claim in claims[:2]:
            await caller.finish_claim(claim, output(1.0))
        told = await caller.sample(2, step=1)
        assert sorted(await caller.commit(told.done.lease_id)) == ["g0", "g1"]
        ref = (await caller.put(data, google_crc32c.value(data))).ref
        big = output(0.25, 7, 3)
        big.payload.ref.CopyFrom(ref)
        await caller.finish_claim(claims[2], big)
        await caller.finish_claim(claims[3], output(0.5, 8, 4, b"small"))
        answer = await caller.checkpoint("save-1", step=1)
        assert answer.checkpoint.counts == pb.GroupCounts(pending=2, running=2, finished=2)
        assert not answer.sampled_uncommitted
        await buffer.kill()
    async with buffer_process(tmp_path) as buffer:
        caller = buffer.caller()
        caller.epoch = 1
        # What came after the checkpoint is rolled back.
        await caller.add("later", step=2)
        restored = await caller.restore("save-1")
        assert restored.counts == pb.GroupCounts(pending=4, finished=2)
        assert restored.step == 1
        assert await prompts(caller) == {f"g{number}": b"prompt %d" % number for number in range(4, 8)}
        (four,) = [group for group in await caller.groups() if group.group_id == "g4"]
        assert dict(four.tags) == {"of": "g4"}
        told = await caller.sample(2, step=1)
        assert told.ids == ["g2", "g3"]
        (first,), (second,) = ([t.outputs[0] for t in group.trajectories] for group in told.groups)
        assert (first.rewards["reward"], first.segments[0].tokens, first.segments[0].weight_version) == (0.25, 7, 3)
        refs = [first.payload.ref, second.payload.ref]
        assert await caller.get(*refs, lease_id=told.done.lease_id) == [data, b"small"]
        await caller.commit(told.done.lease_id)
        ledger = await caller.ledger()
        assert (ledger.added, ledger.committed, ledger.evicted) == (8, 4, 0)
        assert sorted(group.group_id for group in await caller.groups()) == ["g4", "g5", "g6", "g7"]


async def test_h07_leased_groups_are_named_and_come_back_finished(tmp_path: Path) -> None:
    """A batch that was sampled and not committed was trained on or not: the trainer must be told of it."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new("a", "b", "c")
        told = await caller.sample(2)
        answer = await caller.checkpoint("s")
        assert list(answer.sampled_uncommitted) == told.ids == ["a", "b"]
        await caller.commit(told.done.lease_id)
        assert (await caller.restore("s")).counts.finished == 3
        assert (await caller.sample(3)).ids == ["a", "b", "c"]


async def test_h07_checkpoint_is_of_one_moment_while_traffic_goes_on(tmp_path: Path) -> None:
    """Groups written one by one must all be those of the beginning, whatever happens to them meanwhile."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=1)
        names = [f"g{number}" for number in range(3000)]
        await caller.add(*names, prompt=b"p")
        await caller.finish(*(result(name, 0, output(1.0, 1, 0, b"x")) for name in names[:1500]))

        async def traffic() -> None:
            told = await caller.sample(500)
            await caller.commit(told.done.lease_id)
            await caller.evict(*names[500:600])
            for start_ in range(1500, 3000, 100):
                await caller.finish(*(result(name, 0) for name in names[start_ : start_ + 100]))
            await caller.add(*(f"new{number}" for number in range(200)))

        saving = asyncio.create_task(caller.checkpoint("s"))
        while not buffer.desk.runs.require("run").state.watchers:  # noqa: ASYNC110 - the beginning is not announced
            await asyncio.sleep(0)
        await traffic()
        info = (await saving).checkpoint
        assert info.counts == pb.GroupCounts(pending=1500, finished=1500)
        restored = await caller.restore("s")
        assert restored.counts == pb.GroupCounts(pending=1500, finished=1500)
        assert [group.group_id for group in await caller.groups(pb.GROUP_STATE_FINISHED)] == names[:1000]
        assert (await caller.ledger()).added == 3000


async def test_h08_what_was_dropped_as_stale_is_dealt_with(tmp_path: Path) -> None:
    """Dropped prompts that did not count as dealt with were replayed for ever after a resume."""
    names = [str(number) for number in range(1, 11)]
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=1, staleness=pb.Staleness(max_versions=1))
        await caller.open()
        old, young = [names[index] for index in (2, 4, 6)], [names[index] for index in (0, 1, 3, 5, 7, 8, 9)]
        await caller.finish_new(*old, step=1)
        await caller.finish_new(*young, step=2)
        told = await caller.sample(7, step=2)
        assert sorted(told.ids) == sorted(young)
        assert told.done.evictions.evicted == 3
        await caller.commit(told.done.lease_id)
        await caller.checkpoint("s", step=2)
        before = await caller.ledger()
        answer = await caller.restore("s")
        assert answer.cursor == told.done.next_cursor
        assert (await caller.ledger()) == before
        assert not await caller.claim(100)
        assert not await caller.groups()
        assert (await caller.depth()).unpaid_credits == 3
        (due,) = (await caller.wait(1, step=2)).refills
        assert due.count == 3


async def test_h09_new_limits_win_or_are_refused_by_name(tmp_path: Path) -> None:
    """A table that came back with the limits of the checkpoint blocked every insert without a word."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=4, caps=pb.Caps(max_groups=100), staleness=pb.Staleness(max_versions=2))
        await caller.finish_new(*(f"g{number}" for number in range(50)), rewards=(0.0, 1.0, 0.0, 1.0))
        await caller.checkpoint("s")

        async def again(size: int, max_groups: int) -> None:
            await caller.stub.DeleteRun(pb.DeleteRunRequest(run_id=caller.run_id))
            await caller.create(size=size, caps=pb.Caps(max_groups=max_groups), staleness=pb.Staleness(max_versions=8))

        await again(4, 10)
        error = await refused(caller.restore("s"))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "CHECKPOINT_INCOMPATIBLE")
        assert error.metadata["field"] == "config.caps.max_groups"
        assert not await caller.groups()
        await again(8, 100)
        error = await refused(caller.restore("s"))
        assert (error.code, error.metadata["field"]) == (Code.FAILED_PRECONDITION, "config.partitions")
        await again(4, 60)
        assert (await caller.restore("s")).counts.finished == 50
        run = (await caller.stub.GetRun(pb.GetRunRequest(run_id=caller.run_id))).run
        assert (run.config.caps.max_groups, run.config.staleness.max_versions) == (60, 8)
        assert (await caller.depth(step=5)).sampleable == 50, "the old bound on age would have made them stale"
        await caller.add(*(f"n{number}" for number in range(10)))
        assert (await refused(caller.add("one too many"))).reason == "CAP_GROUPS"


async def test_h09_every_difference_is_named_in_the_refusal_or_in_the_log(tmp_path: Path) -> None:
    """A limit that changes in silence is looked for for days."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(caps=pb.Caps(max_groups=100, max_bytes=10_000), max_attempts=2)
        for number in range(20):
            await caller.add(f"g{number}", prompt=b"x" * 100)
        await caller.checkpoint("s")

        async def again(**config: Any) -> None:
            await caller.stub.DeleteRun(pb.DeleteRunRequest(run_id=caller.run_id))
            await caller.create(**config)

        await again(caps=pb.Caps(max_groups=10, max_bytes=1000))
        error = await refused(caller.restore("s"))
        assert error.metadata["field"] == "config.caps.max_groups,config.caps.max_bytes"
        assert "20 groups" in error.metadata["config.caps.max_groups"]
        await again(caps=pb.Caps(max_groups=50, max_bytes=10_000), max_attempts=5, refill=False)
        with capture_logs() as logs:
            await caller.restore("s")
        told = {line["field"]: line for line in logs if line["event"] == "restored under another configuration"}
        assert set(told) == {"max_attempts", "refill", "caps"}
        assert (told["max_attempts"]["checkpoint"], told["max_attempts"]["now"]) == ("2", "5")
        assert "max_groups=50" in told["caps"]["now"]


async def test_h21_a_restore_gives_each_partition_its_own_back(tmp_path: Path) -> None:
    """Checkpoints are of whole runs; within one, nothing of one partition may show in another."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        train, val = buffer.caller(partition="train"), buffer.caller(partition="val")
        await train.create()
        for caller in (train, val):
            await caller.add("a", "b", "c")
        await train.finish(result("a", 0))
        await val.finish(result("b", 0), result("c", 0))
        await train.checkpoint("s")
        await train.take(1)
        await val.evict("a", "b")
        await train.restore("s")
        assert [(await caller.depth()).sampleable for caller in (train, val)] == [1, 2]
        assert [(await caller.ledger()).evicted for caller in (train, val)] == [0, 0]
        assert (await train.sample(1)).ids == ["a"]
        assert (await val.sample(2)).ids == ["b", "c"]


async def test_h10_killed_during_a_save(tmp_path: Path) -> None:
    """A crash while saving destroyed the save before it, or left a half one to be picked as the newest."""
    rng = random.Random(7)
    data = rng.randbytes(2 << 20)
    complete: set[str] = set()
    for life in range(5):
        async with buffer_process(tmp_path) as buffer:
            caller = buffer.caller()
            await caller.create()
            if life == 0:
                for number in range(10):
                    ref = (await caller.put(data, google_crc32c.value(data))).ref
                    await caller.add(f"g{number}")
                    made = output(1.0)
                    made.payload.ref.CopyFrom(ref)
                    await caller.finish(result(f"g{number}", 0, made))
            infos = await caller.checkpoints()
            assert complete <= {info.checkpoint_id for info in infos}
            for info in infos:
                assert (await caller.verify(info.checkpoint_id)).counts.finished == 10
            if infos:
                assert (await caller.restore(infos[0].checkpoint_id)).counts.finished == 10
            saving = asyncio.create_task(caller.checkpoint(f"life-{life}"))
            await asyncio.wait({saving}, timeout=rng.uniform(0.0, 0.15))
            await buffer.kill()
            with suppress(grpc.aio.AioRpcError):
                await saving
                complete.add(f"life-{life}")
    async with running_buffer(data_dir=tmp_path):
        assert not unfinished(tmp_path)


async def test_h10_damaged_missing_and_concurrent_saves(tmp_path: Path) -> None:
    """Damage must be told from absence, and two saves at once must not make one broken file."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new(*(f"g{number}" for number in range(500)))
        answers = await asyncio.gather(caller.checkpoint("a"), caller.checkpoint("a"), caller.checkpoint("b"))
        assert [answer.checkpoint.checkpoint_id for answer in answers] == ["a", "a", "b"]
        assert answers[0].checkpoint == answers[1].checkpoint
        assert (await refused(caller.checkpoint("a", step=9))).reason == "CHECKPOINT_EXISTS"
        assert (await refused(caller.restore("c"))).code is Code.NOT_FOUND
        newest = newest_save(tmp_path)
        whole = newest.read_bytes()
        newest.write_bytes(whole[:-1])
        assert [info.checkpoint_id for info in await caller.checkpoints()] == ["a"]
        error = await refused(caller.restore("b"))
        assert (error.code, error.reason, error.metadata["value"]) == (Code.DATA_LOSS, "CHECKPOINT_DAMAGED", "b")
        middle = len(whole) // 2
        newest.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        assert (await refused(caller.restore("b"))).code is Code.DATA_LOSS
        assert (await refused(caller.verify("b"))).code is Code.DATA_LOSS
        assert len(await caller.groups()) == 500, "a refused restore changes nothing"
        await caller.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(run_id=caller.run_id, checkpoint_id="b"))
        assert (await refused(caller.restore("b"))).code is Code.NOT_FOUND
        assert (await caller.restore("a")).counts.finished == 500


async def test_h10_full_disk_leaves_the_old_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that does not fit must say so and leave nothing of itself."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new("a")
        await caller.checkpoint("good")

        def full(self: checkpoint_file.CheckpointWriter) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint_file.CheckpointWriter, "_sync", full)
        error = await refused(caller.checkpoint("bad"))
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "DISK_FULL")
        monkeypatch.undo()
        assert [info.checkpoint_id for info in await caller.checkpoints()] == ["good"]
        assert (await caller.restore("good")).counts.finished == 1
    assert not unfinished(tmp_path)


async def test_h23_nothing_disappears_uncounted_at_the_cap(tmp_path: Path) -> None:
    """A queue without bound fills memory, one that drops the oldest loses work in silence."""
    payload = b"x" * 100_000
    async with running_buffer(data_dir=tmp_path, payload_memory=1 << 20) as buffer:
        caller = buffer.caller()
        await caller.create(caps=pb.Caps(max_groups=64))
        added = refusals = 0
        for number in range(200):
            if number >= 64:
                error = await refused(caller.add(f"g{number}"))
                assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "CAP_GROUPS")
                refusals += 1
                continue
            await caller.add(f"g{number}")
            added += 1
            (outcome,) = await caller.finish(result(f"g{number}", 0, output(1.0, 1, 0, payload)))
            assert outcome.code == 0
        assert (added, refusals) == (64, 136)
        taken: list[str] = []
        while (await caller.depth()).sampleable:
            taken += await caller.take(8)
        assert taken == [f"g{number}" for number in range(64)]
        ledger = await caller.ledger()
        assert (ledger.added, ledger.committed, ledger.evicted) == (64, 64, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_h23_memory_and_disk_stay_bounded_while_producers_outrun_the_trainer(tmp_path: Path) -> None:
    """A practically unbounded queue ate the machine; here a gigabyte passes through a buffer that may hold 6 MB."""
    payload = random.Random(1).randbytes(100_000)
    async with buffer_process(tmp_path, "--payload-memory", str(1 << 20)) as buffer:
        caller = buffer.caller()
        await caller.create(caps=pb.Caps(max_groups=64), lease_times=pb.LeaseTimes())
        produced = refusals = taken = 0
        sizes: list[int] = []
        memory: list[int] = []
        while produced < 10_000:
            names = [f"g{produced + number}" for number in range(16)]
            try:
                await caller.add(*names)
            except grpc.aio.AioRpcError:
                refusals += 1
                told = await caller.sample(16)
                taken += len(await caller.commit(told.done.lease_id))
                lease = pb.ReleasePayloadRequest(run_id=caller.run_id, lease_id=told.done.lease_id)
                await caller.stub.ReleasePayload(lease)
                sizes.append(bytes_on_disk(tmp_path))
                memory.append(resident_bytes(buffer.process.pid))
                continue
            await caller.finish(*[result(name, 0, output(1.0, 1, 0, payload)) for name in names])
            produced += 16
        ledger = await caller.ledger()
        assert refusals > 500
        assert ledger.added == produced == taken + ledger.present.finished
        # Two segments of 256 MiB, both ballasts, and a journal that is compacted from 32 MiB on.
        assert max(sizes) < 750_000_000, sizes
        assert max(memory[len(memory) // 2 :]) < max(memory[: len(memory) // 4]) + 60_000_000, memory


def bytes_on_disk(directory: Path) -> int:
    """What the files below a directory hold; some of them come and go."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def resident_bytes(pid: int) -> int:
    """What a process holds in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def read_rest(call: Any) -> None:
    """Read a stream, of which something was read already, to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_h50_sigterm_with_parked_waits_and_a_running_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    """A stop that cuts its handlers loses their clean-up, and leaves half a checkpoint."""
    async with buffer_process(tmp_path, "--grace-s", "5") as buffer:
        caller = buffer.caller()
        await caller.create(size=1)
        await caller.finish_new(*(f"g{number}" for number in range(2000)))
        calls = [caller.wait_call(5000, max_wait=None) for _ in range(100)]
        for call in calls:
            assert (await call.read()).HasField("progress"), "it is parked from its first event on"
        waits = [asyncio.create_task(refused(read_rest(call))) for call in calls]
        saving = asyncio.create_task(caller.checkpoint("s"))
        await asyncio.sleep(0.01)
        buffer.process.send_signal(number)
        assert await asyncio.wait_for(buffer.process.wait(), 10) == 0
        for error in await asyncio.gather(*waits):
            assert error.code is Code.UNAVAILABLE
        saved = False
        with suppress(grpc.aio.AioRpcError):
            saved = (await saving).checkpoint.counts.finished == 2000
    async with running_buffer(data_dir=tmp_path) as again:
        caller = again.caller()
        infos = await caller.checkpoints()
        assert not saved or [info.checkpoint_id for info in infos] == ["s"]
        for info in infos:
            await caller.verify(info.checkpoint_id)
        assert (await caller.depth()).sampleable == 2000
        assert not unfinished(tmp_path)


async def test_h50_second_sigterm_ends_at_once_without_damage(tmp_path: Path) -> None:
    """Whoever asks twice does not want to wait; what was answered is there all the same."""
    async with buffer_process(tmp_path, "--grace-s", "60") as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new(*(f"g{number}" for number in range(100)))
        buffer.process.send_signal(signal.SIGTERM)
        buffer.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(buffer.process.wait(), 10)
    async with running_buffer(data_dir=tmp_path) as again:
        assert (await again.caller().depth()).sampleable == 100


async def test_h57_a_restart_is_visible_and_a_wait_is_repeated_on_it(tmp_path: Path) -> None:
    """A caller must be able to see that it speaks to another process, and to wait on as if nothing had been."""
    async with buffer_process(tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        first = (await caller.stub.GetRun(pb.GetRunRequest(run_id=caller.run_id))).incarnation
        await caller.finish_new("a")
        parked = asyncio.create_task(refused_stream(caller.sample_call(2, max_wait=None, request_id="s")))
        await asyncio.sleep(0.1)
        assert await buffer.stop() == 0
        assert (await parked).code is Code.UNAVAILABLE
    async with buffer_process(tmp_path) as buffer:
        caller = buffer.caller()
        assert (await caller.stub.GetRun(pb.GetRunRequest(run_id=caller.run_id))).incarnation != first
        parked_again = asyncio.create_task(caller.sample(2, max_wait=None, request_id="s"))
        await caller.finish_new("b")
        told = await parked_again
        assert told.ids == ["a", "b"]
        # The answer may have been lost: the repeat gets the same batch.
        assert (await caller.sample(2, request_id="s")).done.lease_id == told.done.lease_id


async def test_h60_background_loops_stay_under_a_merciless_collector(tmp_path: Path) -> None:
    """A task that only the loop knows of is collected one day, and then nothing expires any more."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        async with running_buffer(data_dir=tmp_path) as buffer:
            caller = buffer.caller()
            await caller.create(max_attempts=2, lease_times=pb.LeaseTimes())
            status = {loop.name: loop for loop in buffer.host.context.tasks.status()}
            assert {"buffer expiry", "buffer journal", "buffer compaction"} <= set(status)
            for number in range(20):
                await caller.finish_new(f"g{number}")
                gc.collect()
            assert all(loop.running and not loop.restarts for loop in buffer.host.context.tasks.status())
    finally:
        gc.set_threshold(*thresholds)


async def test_h60_a_loop_that_fails_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a background loop must be seen and survived."""
    calls = 0
    snapshot = Keeper.snapshot

    async def fails_once(self: Keeper) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("injected")
        await snapshot(self)

    monkeypatch.setattr(Keeper, "snapshot", fails_once)
    monkeypatch.setattr(SqliteJournal, "compaction_due", True)
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        buffer.desk.compaction_due.set()
        async with asyncio.timeout(20):
            # The supervisor pauses for a second before it starts the loop again; nothing announces that.
            while compaction(buffer).restarts == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert "injected" in compaction(buffer).last_error
            buffer.desk.compaction_due.set()
            while calls < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_h60_claims_still_expire_after_the_loop_that_expires_them_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sweeper that is gone leaves every later claim of a dead worker in its hands for ever."""
    calls = 0
    expire_due = Desk._expire_due

    def fails_once(self: Desk) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("injected")
        expire_due(self)

    monkeypatch.setattr(Desk, "_expire_due", fails_once)
    async with running_buffer() as buffer:
        caller = buffer.caller()
        await caller.create(max_attempts=9, lease_times=pb.LeaseTimes(claim=seconds(0.05)))
        await caller.add("g")
        await caller.claim()
        async with asyncio.timeout(20):
            while not (again := await caller.claim(max_wait=1.0)):
                pass
        assert again[0].token.attempt == 2
        [loop] = [status for status in buffer.host.context.tasks.status() if status.name == "buffer expiry"]
        assert loop.running
        assert loop.restarts == 1
        assert "injected" in loop.last_error
        assert loop.last_tick is not None


def compaction(buffer: Buffer) -> LoopStatus:
    """How the loop that compacts fares."""
    return next(status for status in buffer.host.context.tasks.status() if status.name == "buffer compaction")


async def test_h61_a_damaged_journal_is_never_an_empty_start(tmp_path: Path) -> None:
    """A service that starts empty over damage looks healthy and has lost everything."""
    async with buffer_process(tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        for number in range(50):
            await caller.finish_new(f"g{number}")
        assert await buffer.stop() == 0
    database = tmp_path / "journal" / "journal.db"
    data = bytearray(database.read_bytes())
    where = data.rindex(b"g30")
    data[where] ^= 0xFF
    database.write_bytes(data)
    process = await start(tmp_path)
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode not in (0, None)
    assert b"DATA_LOSS" in errors
    assert b"last good position" in errors
