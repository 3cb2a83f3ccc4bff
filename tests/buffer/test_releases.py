"""External payloads: their owners learn what they may delete, over restarts, and checkpoints keep what they name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from services.buffer.metrics import BufferMetrics
from services.buffer.service import BufferService
from tests.buffer.helpers import CALL_S, Buffer, Caller, refused, refused_stream, result, running_buffer
from turnout.buffer.v1 import buffer_pb2 as pb


def external(name: str, store: str = "ray", size: int = 100, crc: int = 7) -> pb.Payload:
    return pb.Payload(ref=pb.PayloadRef(id=name, store=store, size=size, crc32c=crc))


async def finish(caller: Caller, *names: str, store: str = "ray") -> None:
    """A group per name, finished with an external payload of that name."""
    await caller.add(*names)
    outputs = [
        pb.Output(segments=[pb.Segment(tokens=1)], rewards={"reward": 0.0}, payload=external(name, store))
        for name in names
    ]
    outcomes = await caller.finish(*(result(name, 0, made) for name, made in zip(names, outputs, strict=True)))
    assert [outcome.reason for outcome in outcomes] == [""] * len(names)


async def consume(caller: Caller, count: int) -> None:
    """Sample, commit and release."""
    told = await caller.sample(count)
    assert told.outcome == "REACHED"
    await caller.commit(told.done.lease_id)
    request = pb.ReleasePayloadRequest(run_id=caller.run_id, epoch=caller.epoch, lease_id=told.done.lease_id)
    await caller.stub.ReleasePayload(request, timeout=CALL_S)


class Owner:
    """Watches a store."""

    def __init__(self, caller: Caller, store: str = "ray") -> None:
        self.caller = caller
        self.store = store
        self.watch = caller.stub.WatchReleases(
            pb.WatchReleasesRequest(run_id=caller.run_id, store=store), timeout=CALL_S
        )

    async def hear(self, count: int) -> list[str]:
        heard: list[str] = []
        async with asyncio.timeout(CALL_S):
            while len(heard) < count:
                answer = await self.watch.read()
                assert isinstance(answer, pb.WatchReleasesResponse), "the stream ended"
                assert all((ref.store, ref.size, ref.crc32c) == (self.store, 100, 7) for ref in answer.refs)
                heard += [ref.id for ref in answer.refs]
        return heard

    async def ack(self, *names: str) -> int:
        request = pb.AckReleasesRequest(run_id=self.caller.run_id, store=self.store, ids=names)
        return (await self.caller.stub.AckReleases(request, timeout=CALL_S)).acknowledged


async def waiting(caller: Caller, store: str = "ray") -> list[str]:
    """What a new owner hears first; what is let go later comes behind a marker in another group."""
    marker = f"marker-{store}"
    await finish(caller, marker, store=store)
    await caller.evict(marker)
    owner = Owner(caller, store)
    heard: list[str] = []
    while marker not in heard:
        heard += await owner.hear(1)
    owner.watch.cancel()
    await owner.ack(marker)
    return heard[:-1]


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Buffer]:
    async with running_buffer(data_dir=tmp_path) as running:
        yield running


async def test_an_owner_learns_of_releases_and_evictions_in_order(caller: Caller) -> None:
    """Bytes that nobody names any more fill the store of their owner for ever."""
    await caller.create()
    owner = Owner(caller)
    await finish(caller, "a", "b", "c")
    await finish(caller, "other", store="file")
    await consume(caller, 1)
    assert await owner.hear(1) == ["a"]
    await caller.evict("c", "b", "other")
    assert await owner.hear(2) == ["c", "b"]
    assert await Owner(caller).hear(3) == ["a", "c", "b"]
    assert await owner.ack("a", "c", "nobody's") == 2
    assert await owner.ack("a", "c") == 0
    assert await Owner(caller).hear(1) == ["b"]
    assert await Owner(caller, "file").hear(1) == ["other"]


async def test_metrics_show_what_owners_did_not_delete_yet(buffer: Buffer) -> None:
    """An owner that does not run is noticed before its store is full."""
    caller = buffer.caller()
    await caller.create()
    await finish(caller, "a", "b")
    await caller.evict("a")
    shown = [
        (sample.labels["state"], sample.value)
        for metric in BufferMetrics(buffer.desk).collect()
        for sample in metric.samples
        if sample.name == "turnout_buffer_external_payloads"
    ]
    assert shown == [("named", 1), ("held", 0), ("let_go", 1)]


async def test_a_prompt_in_an_external_store_is_let_go_too(caller: Caller) -> None:
    """Prompts with pictures are as large as outputs."""
    await caller.create()
    group = pb.GroupSpec(group_id="g", prompt=external("picture"))
    await caller.stub.AddGroups(pb.AddGroupsRequest(**caller.place, step=0, groups=[group]), timeout=CALL_S)
    await caller.evict("g")
    assert await Owner(caller).hear(1) == ["picture"]


async def test_a_deleted_run_lets_everything_go_and_the_watch_ends(buffer: Buffer) -> None:
    """The owner outlives the run; once it has deleted all of it there is nothing left to wait for."""
    caller = buffer.caller()
    await caller.create()
    await finish(caller, "a", "b")
    owner = Owner(caller)
    await caller.stub.DeleteRun(pb.DeleteRunRequest(run_id=caller.run_id), timeout=CALL_S)
    assert await owner.hear(2) == ["a", "b"]
    assert await Owner(caller).hear(2) == ["a", "b"]
    assert await owner.ack("a", "b") == 2
    async with asyncio.timeout(CALL_S):
        assert await owner.watch.read() is grpc.aio.EOF
    assert (await refused_stream(Owner(caller).watch)).reason == "RUN_NOT_FOUND"
    assert (await refused(owner.ack("a"))).reason == "RUN_NOT_FOUND"


async def test_an_id_in_use_or_let_go_cannot_be_named_as_another_payload(caller: Caller) -> None:
    """The owner would delete bytes that are needed."""
    await caller.create()
    await finish(caller, "a")
    await caller.add("second", "third")
    wrong = pb.Output(segments=[pb.Segment(tokens=1)], payload=external("a", size=101))
    (outcome,) = await caller.finish(result("second", 0, wrong))
    assert outcome.reason == "PAYLOAD_MISMATCH"
    await caller.evict("a")
    late = pb.Output(segments=[pb.Segment(tokens=1)], payload=external("a"))
    (outcome,) = await caller.finish(result("second", 0, late))
    assert outcome.reason == "PAYLOAD_RELEASED"
    assert await Owner(caller).ack("a") == 1
    (outcome,) = await caller.finish(result("second", 0, late))
    assert outcome.code == 0


async def test_a_payload_that_two_groups_name_is_counted_once_and_goes_with_the_last(buffer: Buffer) -> None:
    """Shared prompts are one object in the store."""
    caller = buffer.caller()
    await caller.create()
    groups = [pb.GroupSpec(group_id=name, prompt=external("shared")) for name in ("a", "b")]
    await caller.stub.AddGroups(pb.AddGroupsRequest(**caller.place, step=0, groups=groups), timeout=CALL_S)
    assert buffer.desk.runs.require(caller.run_id).state.payloads.held == 100
    await caller.evict("a")
    assert await waiting(caller) == []
    await caller.evict("b")
    assert await waiting(caller) == ["shared"]
    assert buffer.desk.runs.require(caller.run_id).state.payloads.held == 0


async def test_h15_payloads_of_results_that_came_too_late_are_let_go(buffer: Buffer) -> None:
    """A worker whose claim was lost, or whose group is gone, put its bytes for nothing, and nobody else knows them."""
    caller = buffer.caller()
    await caller.create(max_attempts=3)
    await finish(caller, "kept")

    def handed(group_id: str, name: str, token: pb.ClaimToken | None = None) -> pb.TrajectoryResult:
        made = pb.Output(segments=[pb.Segment(tokens=1)], rewards={"reward": 0.0}, payload=external(name))
        return result(group_id, 0, made, token=token)

    await caller.add("g")
    (claim,) = await caller.claim()
    await caller.fail(claim, partial=[pb.Output(segments=[pb.Segment(tokens=1)], payload=external("partial"))])
    reasons = [
        outcome.reason
        for outcome in await caller.finish(
            handed("never", "unknown"),
            handed("g", "late", claim.token),
            handed("kept", "other", claim.token),
            handed("kept", "kept", claim.token),
        )
    ]
    assert reasons == ["GROUP_NOT_FOUND", "STALE_CLAIM", "", ""]
    assert await waiting(caller) == ["unknown", "late", "other"]
    # A fault of the result itself is mended and tried again with the same bytes.
    broken = pb.Output(segments=[pb.Segment(tokens=0)], payload=external("mended"))
    (claim,) = await caller.claim()
    assert [one.reason for one in await caller.finish(result("g", 0, broken, token=claim.token))] == [
        "EMPTY_TRAJECTORY"
    ]
    assert [one.reason for one in await caller.finish(handed("g", "mended", claim.token))] == [""]
    assert await waiting(caller) == ["unknown", "late", "other", "partial"]


async def test_partial_output_that_is_not_kept_is_let_go(caller: Caller) -> None:
    """The attempts are used up, or partial output is discarded: nobody continues it."""
    await caller.create(partial_rollout=False, max_attempts=2)
    await caller.add("g")
    (claim,) = await caller.claim()
    await caller.fail(claim, partial=[pb.Output(segments=[pb.Segment(tokens=1)], payload=external("partial"))])
    assert await waiting(caller) == ["partial"]


async def test_releases_survive_restarts_until_they_are_acknowledged(tmp_path: Path) -> None:
    """At least once, whoever dies in between; by replay of records and from a snapshot."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await finish(caller, "a", "b", "c", "d")
        await consume(caller, 2)
        assert await Owner(caller).ack("a") == 1
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        assert await waiting(caller) == ["b"]
        service = buffer.host.service
        assert isinstance(service, BufferService)
        assert service.keeper is not None
        await service.keeper.snapshot()
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        assert await waiting(caller) == ["b"]
        await caller.stub.DeleteRun(pb.DeleteRunRequest(run_id=caller.run_id), timeout=CALL_S)
    async with running_buffer(data_dir=tmp_path) as buffer:
        owner = Owner(buffer.caller())
        assert sorted(await owner.hear(3)) == ["b", "c", "d"]
        assert await owner.ack("b", "c", "d") == 3
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert (await refused_stream(Owner(buffer.caller()).watch)).reason == "RUN_NOT_FOUND"


async def test_h07_a_checkpoint_keeps_the_external_payloads_it_names(tmp_path: Path) -> None:
    """Restored groups whose bytes the owner deleted are lost, and nothing says so before they are read."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await finish(caller, "a", "b")
        await caller.checkpoint("one", step=1)
        await finish(caller, "later")
        await consume(caller, 3)
        assert await waiting(caller) == ["later"]
        service = buffer.host.service
        assert isinstance(service, BufferService)
        assert service.keeper is not None
        await service.keeper.snapshot()
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        assert await waiting(caller) == ["later"]
        await caller.restore("one")
        assert [group.trajectories[0].outputs[0].payload.ref.id for group in await caller.groups()] == ["a", "b"]
        await consume(caller, 2)
        assert await waiting(caller) == ["later"]
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        request = pb.DeleteCheckpointRequest(run_id=caller.run_id, checkpoint_id="one")
        await caller.stub.DeleteCheckpoint(request, timeout=CALL_S)
        assert await waiting(caller) == ["later", "a", "b"]


async def test_a_restore_lets_go_what_only_the_replaced_content_named(kept: Buffer) -> None:
    """Otherwise every roll-back would leave the groups after the checkpoint in the store."""
    caller = kept.caller()
    await caller.create()
    await finish(caller, "a")
    await caller.checkpoint("one", step=1)
    await finish(caller, "b")
    await caller.restore("one")
    assert await waiting(caller) == ["b"]


async def test_a_checkpoint_that_failed_holds_nothing(kept: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk must not keep the bytes of the store for ever."""
    caller = kept.caller()
    await caller.create()
    await finish(caller, "a")

    def full(self: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr("services.buffer.storage.checkpoint_file.CheckpointWriter.finish", full)
    assert (await refused(caller.checkpoint("one"))).reason == "DISK_FULL"
    await caller.evict("a")
    assert await waiting(caller) == ["a"]


async def test_what_a_crash_left_of_a_checkpoint_holds_nothing(tmp_path: Path) -> None:
    """The record that a checkpoint began is durable before its file is there."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await finish(caller, "a")
        await caller.checkpoint("one")
        await caller.evict("a")
        assert await waiting(caller) == []
    (file,) = (tmp_path / "checkpoints").rglob("*.ckpt")
    file.unlink()
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert await waiting(buffer.caller()) == ["a"]


@pytest.mark.parametrize(("run_id", "store", "reason"), [("nobody", "ray", "RUN_NOT_FOUND"), ("run", "", "BAD_ID")])
async def test_a_watch_of_nothing_is_refused(caller: Caller, run_id: str, store: str, reason: str) -> None:
    """An owner with a wrong name would wait for ever; the buffer's own store has no owner outside."""
    await caller.create()
    watch = caller.stub.WatchReleases(pb.WatchReleasesRequest(run_id=run_id, store=store), timeout=CALL_S)
    assert (await refused_stream(watch)).reason == reason
