"""What a restart brings back: everything that was answered, as it was."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.buffer.service import BufferService
from services.buffer.storage.audit import audit
from services.buffer.storage.checkpoints import Checkpoints
from services.buffer.storage.keeper import Keeper
from services.runtime.clock import ManualClock
from services.runtime.errors import Code, TurnoutError
from services.runtime.host import StartError
from services.runtime.journal import Durability, JournalOptions
from services.runtime.journal.database import Database
from services.runtime.journal.mark import read_mark
from services.runtime.journal.sqlite import SqliteJournal
from tests.buffer.helpers import (
    Buffer,
    Caller,
    knowledge,
    output,
    refused,
    refused_stream,
    result,
    running_buffer,
    seconds,
)
from turnout.buffer.storage.v1.storage_pb2 import Part
from turnout.buffer.v1 import buffer_pb2 as pb


def keeper_of(buffer: Buffer) -> Keeper:
    service = buffer.host.service
    assert isinstance(service, BufferService)
    assert service.keeper is not None
    return service.keeper


async def busy(caller: Caller) -> None:
    """Do some of everything that changes a run."""
    await caller.create(
        size=2,
        max_attempts=3,
        staleness=pb.Staleness(max_versions=2),
        group_filter_metric="reward",
        caps=pb.Caps(max_groups=100),
    )
    await caller.open()
    await caller.add(*(f"g{number}" for number in range(10)), step=1, prompt=b"prompt", request_id="add-1")
    claims = await caller.claim(6, request_id="claim-1")
    first, second, third = claims
    await caller.finish_claim(first, output(1.0, 3, 0, b"bytes"))
    await caller.finish(
        result(second.group_id, 0, output(1.0), token=second.token),
        result(second.group_id, 1, output(0.0), token=second.token),
        request_id="finish-1",
    )
    await caller.fail(third, partial=[output(0.5, 2, 0, b"partial")])
    data = b"x" * 300_000
    ref = (await caller.put(data, google_crc32c.value(data))).ref
    await caller.put(b"unnamed", google_crc32c.value(b"unnamed"))
    (other,) = await caller.claim(2)
    held = output(1.0)
    held.payload.ref.CopyFrom(ref)
    await caller.finish(
        result(other.group_id, other.trajectories[0].index, held, token=other.token),
    )
    await caller.finish_new("a", "b", "c", step=1, rewards=(0.0, 1.0))
    await caller.finish_new("flat", step=1, rewards=(1.0, 1.0))
    await caller.stub.FailGroup(pb.FailGroupRequest(**caller.place, group_id="g9", error="no"))
    told = await caller.sample(2, step=2, request_id="sample-1")
    assert told.outcome == "REACHED"
    await caller.commit(told.done.lease_id)
    told = await caller.sample(1, step=2, request_id="sample-2")
    assert told.outcome == "REACHED"
    told = await caller.wait(90, step=2, cursor=0)
    assert told.outcome == "TIMED_OUT"
    assert told.refills
    await caller.add("refill-1", step=2, refill_claim_id=told.refills[0].refill_claim_id)
    await caller.evict("g8", refill=True)


async def test_a_restart_brings_back_all_that_was_known(tmp_path: Path) -> None:
    """Replay must come to the very state that answered, or a worker's token, a lease or a credit would be lost."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        await busy(buffer.caller())
        before = knowledge(buffer.desk.memory)
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert knowledge(buffer.desk.memory) == before


async def test_a_snapshot_holds_all_that_was_known(tmp_path: Path) -> None:
    """After compaction a start reads the image and not the records: both must tell the same."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        await busy(buffer.caller())
        before = knowledge(buffer.desk.memory)
        await keeper_of(buffer).snapshot()
        assert buffer.desk.journal is not None
        assert buffer.desk.journal.snapshot_position == buffer.desk.journal.position
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert knowledge(buffer.desk.memory) == before
        caller = buffer.caller()
        caller.epoch = 1
        await caller.finish_new("later", step=2, rewards=(0.0, 1.0))
        again = knowledge(buffer.desk.memory)
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert knowledge(buffer.desk.memory) == again


async def test_payloads_without_their_journal_are_not_taken_for_a_new_buffer(tmp_path: Path) -> None:
    """A start without the journal served nothing, and deleted all payloads since no record named them."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.add("g")
        assert {outcome.code for outcome in await caller.finish(result("g", 0, output(payload=bytes(4096))))} == {0}
    away = tmp_path / "away"
    (tmp_path / "journal").rename(away)
    before = {path: path.read_bytes() for path in (tmp_path / "payloads").glob("segment-*")}
    assert before
    with pytest.raises(StartError, match=r"DATA_LOSS / JOURNAL_DAMAGED.*last good position is 0"):
        async with running_buffer(data_dir=tmp_path):
            pass
    assert {path: path.read_bytes() for path in (tmp_path / "payloads").glob("segment-*")} == before
    with pytest.raises(TurnoutError, match="JOURNAL_NOT_FOUND"):
        await audit(tmp_path)
    away.rename(tmp_path / "journal")
    database = tmp_path / "journal" / "journal.db"
    database.rename(away)
    missing = r"JOURNAL_DAMAGED.*the database is missing"
    with pytest.raises(StartError, match=missing):
        async with running_buffer(data_dir=tmp_path):
            pass
    with pytest.raises(TurnoutError, match=missing):
        await audit(tmp_path)
    away.rename(database)
    async with running_buffer(data_dir=tmp_path) as buffer:
        told = await buffer.caller().sample(1)
        ref = told.groups[0].trajectories[0].outputs[0].payload.ref
        assert await buffer.caller().get(ref, lease_id=told.done.lease_id) == [bytes(4096)]


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.OS])
async def test_an_audit_leaves_what_the_journal_promises(tmp_path: Path, durability: Durability) -> None:
    """After an audit of `fsync` as `os`, records that went missing would pass for those that power loss may cost."""
    async with running_buffer(data_dir=tmp_path, durability=durability.value) as buffer:
        await buffer.caller().create()
    before = read_mark(tmp_path / "journal" / "journal.mark")
    assert before is not None
    assert before.durability is durability
    assert [found.run_id for found in (await audit(tmp_path)).partitions] == ["run", "run"]
    assert read_mark(tmp_path / "journal" / "journal.mark") == before
    lock = tmp_path / "journal" / "journal.lock"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(TurnoutError, match="JOURNAL_IO"):
        await audit(tmp_path)


async def test_no_snapshot_is_taken_of_a_log_that_is_short_by_now(tmp_path: Path) -> None:
    """All through a snapshot the log is as long as before it, so each was followed at once by a second one."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        await busy(buffer.caller())
        journal = buffer.desk.journal
        assert journal is not None
        assert not journal.compaction_due
        buffer.desk.compaction_due.set()
        await asyncio.sleep(0.2)
        assert not buffer.desk.compaction_due.is_set()
        assert journal.snapshot_position == 0


class Disk:
    """A disk that can be told to refuse what the journal writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        append = Database._append

        def refusing(database: Database, count: int, body: bytes) -> None:
            if self.error is not None:
                raise self.error
            append(database, count, body)

        monkeypatch.setattr(Database, "_append", refusing)


async def until_health(buffer: Buffer, status: int) -> None:
    """Return once the health of the service is this."""
    stub: Any = health_pb2_grpc.HealthStub(buffer.channel)
    request = health_pb2.HealthCheckRequest(service="turnout.buffer.v1.ReplayBuffer")
    async with asyncio.timeout(20):
        async for answer in stub.Watch(request):
            if answer.status == status:
                return


async def test_a_failed_commit_takes_back_what_was_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that holds what the disk refused would answer for effects that no restart brings back."""
    disk = Disk(monkeypatch)
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new("kept")
        claimless = await caller.sample(1, request_id="s")
        parked = asyncio.create_task(refused_stream(caller.wait_call(5, max_wait=None)))
        await buffer.until_parked(1)
        disk.error = OSError(errno.EIO, "Input/output error")
        error = await refused(caller.add("refused"))
        assert error.code is Code.UNAVAILABLE
        assert (await parked).code is Code.UNAVAILABLE
        await until_health(buffer, health_pb2.HealthCheckResponse.NOT_SERVING)
        # Loading ends with a record of its own: a call that comes as the disk refuses that is told so.
        assert (await refused(caller.depth())).reason in ("RELOADING", "JOURNAL_IO")
        disk.error = None
        await until_health(buffer, health_pb2.HealthCheckResponse.SERVING)
        assert [group.group_id for group in await caller.groups()] == ["kept"]
        assert await caller.commit(claimless.done.lease_id) == ["kept"]
        await caller.add("refused")
        assert (await caller.ledger()).added == 2
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert (await buffer.caller().ledger()).added == 2


async def test_a_failed_sync_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed fsync the kernel forgets what it could not write: nothing this process says can be trusted."""
    disk = Disk(monkeypatch)
    async with running_buffer(data_dir=tmp_path) as buffer:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def end(code: int) -> None:
            if not ended.done():
                ended.set_result(code)

        monkeypatch.setattr(keeper_of(buffer)._mending, "_exit", end)
        caller = buffer.caller()
        await caller.create()
        failure = sqlite3.OperationalError("disk I/O error")
        failure.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        disk.error = failure
        assert (await refused(caller.add("g"))).code is Code.UNAVAILABLE
        assert await asyncio.wait_for(ended, 20) != 0


async def test_a_disk_without_room_takes_commits_and_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What frees space must stay possible when there is none."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new("a", "b")
        told = await caller.sample(1)
        await caller.add("there", request_id="add")
        monkeypatch.setattr(SqliteJournal, "short_of_space", property(lambda journal: True))
        for call in (caller.add("c"), caller.checkpoint("s"), caller.put(b"x", google_crc32c.value(b"x"))):
            error = await refused(call)
            assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "DISK_FULL")
        assert (await caller.add("there", request_id="add")).added == 1, "the answer was lost, and it did happen"
        assert await caller.commit(told.done.lease_id) == ["a"]
        assert (await caller.evict("b")).evicted == 1


async def test_a_disk_that_has_room_again_takes_what_is_new(tmp_path: Path) -> None:
    """The reserve was given back once; without taking it again the buffer would refuse everything until a restart."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        journal = buffer.desk.journal
        assert journal is not None
        await journal.give_back_ballast()
        assert (await refused(caller.add("a"))).reason == "DISK_FULL"
        async with asyncio.timeout(20):
            while journal.short_of_space:  # noqa: ASYNC110 - the disk tells nobody
                await asyncio.sleep(0.01)
        assert (await caller.add("a")).added == 1


async def test_time_goes_on_over_a_restart_and_leases_begin_anew(tmp_path: Path) -> None:
    """A clock that begins at zero again would end every lease at once, or never."""
    clock = ManualClock(1000.0)
    times = pb.LeaseTimes(claim=seconds(10), sample=seconds(10), payload=seconds(10))
    async with running_buffer(clock, data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=1, max_attempts=3, lease_times=times)
        await caller.finish_new("done")
        told = await caller.sample(1)
        await caller.add("g")
        (claim,) = await caller.claim()
        await clock.advance(9)
        now = buffer.desk.clock.now()
    clock = ManualClock(5.0)
    async with running_buffer(clock, data_dir=tmp_path) as buffer:
        assert buffer.desk.clock.now() >= now - 9
        caller = buffer.caller()
        await clock.advance(9)
        assert (await caller.depth()).counts == pb.GroupCounts(running=1, sampled=1)
        assert await caller.commit(told.done.lease_id) == ["done"]
        await clock.advance(2)
        assert (await caller.depth()).counts == pb.GroupCounts(pending=1)
        outcomes = await caller.finish(result("g", 0, token=claim.token))
        assert outcomes[0].reason == "STALE_CLAIM"


async def test_first_answers_survive_a_restart_and_a_snapshot(tmp_path: Path) -> None:
    """A client that repeats a call after a restart must not have it done twice."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=1)
        await caller.add("a", request_id="add")
        (claim,) = await caller.claim(request_id="claim")
        await caller.finish(result("a", 0, token=claim.token), request_id="finish")
    for _ in range(2):
        async with running_buffer(data_dir=tmp_path) as buffer:
            caller = buffer.caller()
            assert (await caller.add("a", request_id="add")).added == 1
            assert not await caller.claim(request_id="claim"), "its claim has ended"
            (outcome,) = await caller.finish(result("a", 0, token=claim.token), request_id="finish")
            assert outcome.code == 0
            assert (await refused(caller.add("b", request_id="add"))).reason == "REQUEST_ID_REUSED"
            assert (await caller.ledger()).added == 1
            await keeper_of(buffer).snapshot()


async def test_ids_are_never_made_twice(tmp_path: Path) -> None:
    """After power loss the newest records may be gone: a claim under the id of a lost one would let a stranger in."""
    tokens: set[str] = set()
    for life in range(3):
        async with running_buffer(data_dir=tmp_path) as buffer:
            caller = buffer.caller()
            await caller.create(size=1)
            await caller.add(f"g{life}", size=1)
            (claim,) = await caller.claim()
            assert claim.token.claim_id.split("-")[1] not in {token.split("-")[1] for token in tokens}
            tokens.add(claim.token.claim_id)


async def test_compaction_goes_on_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal stays bounded while it is written, and what is written during a snapshot is not lost."""
    monkeypatch.setattr("services.buffer.service.JournalOptions", partial(JournalOptions, compact_bytes=100_000))
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=1)
        journal = buffer.desk.journal
        assert journal is not None
        first = journal.snapshot_position
        for number in range(60):
            await caller.finish_new(*(f"g{number}.{place}" for place in range(50)))
            await caller.take(40)
        async with asyncio.timeout(20):
            while journal.snapshot_position == first or journal.compaction_due:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
        before = knowledge(buffer.desk.memory)
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert knowledge(buffer.desk.memory) == before
        assert (await buffer.caller().ledger()).committed == 2400


async def test_a_repeated_restore_discards_nothing_also_after_a_restart(tmp_path: Path) -> None:
    """The answer to a restore may be lost; its repeat must not roll back what was admitted since."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new("a")
        await caller.checkpoint("s", step=3)
        await caller.add("gone", request_id="add")
        first = await caller.restore("s", request_id="restore")
        await caller.add("later")
        assert await caller.restore("s", request_id="restore") == first
        assert [group.group_id for group in await caller.groups()] == ["a", "later"]
        before = knowledge(buffer.desk.memory)
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert knowledge(buffer.desk.memory) == before
        caller = buffer.caller()
        assert await caller.restore("s", request_id="restore") == first
        assert [group.group_id for group in await caller.groups()] == ["a", "later"]
        assert (await caller.add("gone", request_id="add")).added == 1, "a restore forgets the answers before it"


async def test_parked_calls_end_so_that_they_are_repeated_on_what_was_restored(tmp_path: Path) -> None:
    """A worker parked on the old content would never hear of the new."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.checkpoint("s")
        parked = [
            asyncio.create_task(refused_stream(caller.wait_call(3, max_wait=None))),
            asyncio.create_task(refused(caller.claim(max_wait=60))),
        ]
        await buffer.until_parked(2)
        await caller.restore("s")
        assert {(await call).reason for call in parked} == {"RUN_RESTORED"}
        assert {(await call).code for call in parked} == {Code.UNAVAILABLE}


async def test_a_payload_without_bytes_survives_a_snapshot_and_a_restore(tmp_path: Path) -> None:
    """Its reference was given out after a restart, and reading it was refused as if it were of another group."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=1)
        await caller.add("g")
        (claim,) = await caller.claim()
        await caller.finish_claim(claim, output(1.0, 1, 0, b""))
        await caller.checkpoint("s")
        await keeper_of(buffer).snapshot()
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        for restore in (False, True):
            if restore:
                await caller.restore("s")
            told = await caller.sample(1)
            ref = told.groups[0].trajectories[0].outputs[0].payload.ref
            assert await caller.get(ref, lease_id=told.done.lease_id) == [b""]


async def test_a_checkpoint_is_refused_for_a_payload_that_is_lost_until_its_group_is_evicted(tmp_path: Path) -> None:
    """A checkpoint that left the bytes out in silence would restore a group that nobody can train on."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.add("bad", "good")
        for name in ("bad", "good"):
            data = name.encode() * 1024
            uploaded = output()
            uploaded.payload.ref.CopyFrom((await caller.put(data, google_crc32c.value(data))).ref)
            assert [outcome.code for outcome in await caller.finish(result(name, 0, uploaded))] == [0]
    (segment,) = (tmp_path / "payloads").glob("segment-*")
    stored = bytearray(segment.read_bytes())
    stored[stored.index(b"badbad") + 100] ^= 1
    segment.write_bytes(stored)
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        refs = {group.group_id: group.trajectories[0].outputs[0].payload.ref for group in await caller.groups()}
        error = await refused(caller.checkpoint("c"))
        assert (error.code, error.reason, error.metadata["value"]) == (
            Code.DATA_LOSS,
            "PAYLOAD_DAMAGED",
            refs["bad"].id,
        )
        assert await caller.checkpoints() == []
        await caller.evict("bad")
        assert (await caller.checkpoint("c")).checkpoint.counts.finished == 1
        assert (await caller.verify("c")).bytes == len(b"good" * 1024)


async def test_a_download_that_a_restore_overtakes_may_be_repeated(tmp_path: Path) -> None:
    """Told that its run does not exist, a worker gives up on a run that is there."""
    data = bytes(32 << 20)
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=1)
        await caller.checkpoint("s")
        kept = await caller.put(data, google_crc32c.value(data))
        await caller.add("g")
        large = output(1.0, 1, 0)
        large.payload.ref.CopyFrom(kept.ref)
        (claim,) = await caller.claim()
        await caller.finish_claim(claim, large)
        told = await caller.sample(1)
        request = pb.GetPayloadsRequest(run_id=caller.run_id, refs=[kept.ref], lease_id=told.done.lease_id)
        call = caller.stub.GetPayloads(request)
        await anext(aiter(call))
        await caller.restore("s")
        error = await refused_stream(call)
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "RUN_REPLACED")


async def test_who_watches_the_groups_is_told_of_a_restore_once(tmp_path: Path) -> None:
    """Without the event a watcher takes groups that came back for groups that live on after their commit."""

    async def kinds(caller: Caller, count: int) -> list[tuple[str, str]]:
        call = caller.stub.WatchGroups(pb.WatchGroupsRequest(run_id=caller.run_id, from_sequence=1))
        told: list[tuple[str, str]] = []
        async for message in call:
            told += [(pb.GroupEventKind.Name(one.kind), one.group_id) for one in message.events]
            if len(told) >= count:
                break
        call.cancel()
        return told

    expected = [(f"GROUP_EVENT_KIND_{kind}", name) for kind, name in (("ADDED", "a"), ("RESTORED", ""), ("ADDED", "b"))]
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.checkpoint("s")
        await caller.add("a")
        for _ in range(2):
            await caller.restore("s", request_id="restore")
        await caller.add("b")
        assert await kinds(caller, 3) == expected
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert await kinds(buffer.caller(), 3) == expected


async def test_a_buffer_without_data_directory_offers_no_checkpoints() -> None:
    """A save that would end with the process is none, and the scheduler must be able to say so."""
    async with running_buffer() as buffer:
        caller = buffer.caller()
        await caller.create()
        for call in (caller.checkpoint("s"), caller.restore("s"), caller.checkpoints(), caller.verify("s")):
            assert (await refused(call)).code is Code.UNIMPLEMENTED


async def test_a_snapshot_never_begins_within_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the place of the first half of the restore's records, and no start could apply the second."""
    parts = Checkpoints.parts
    snapshots: list[asyncio.Task[None]] = []

    async def with_snapshot(self: Checkpoints, run_id: str, checkpoint_id: str) -> AsyncIterator[Part]:
        async for part in parts(self, run_id, checkpoint_id):
            yield part
            if not snapshots:
                snapshots.append(asyncio.create_task(keeper_of(buffer).snapshot()))
            await asyncio.sleep(0)

    monkeypatch.setattr(Checkpoints, "parts", with_snapshot)
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new(*(f"g{number}" for number in range(1000)))
        await caller.checkpoint("s")
        await caller.restore("s")
        await snapshots[0]
        before = knowledge(buffer.desk.memory)
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert knowledge(buffer.desk.memory) == before
        assert (await buffer.caller().depth()).sampleable == 1000


async def test_a_snapshot_that_fails_lets_go_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that nobody writes would copy every group that changes, for ever."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new("a")

        async def refusing(self: SqliteJournal, position: int, chunks: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(SqliteJournal, "snapshot", refusing)
        with pytest.raises(OSError, match="No space"):
            await keeper_of(buffer).snapshot()
        assert not buffer.desk.runs.require("run").state.watchers
