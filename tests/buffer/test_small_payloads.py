"""Small payloads, which stay with their group, are to a client like all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.buffer.domain.outputs import SMALL_BYTES
from services.runtime.errors import Code
from tests.buffer.helpers import Caller, output, refused_stream, result, running_buffer
from tests.buffer.test_restarts import keeper_of
from turnout.buffer.v1 import buffer_pb2 as pb

# The last two are kept in the store, beside what stays with the group.
DATA = (b"", b"a", b"b" * SMALL_BYTES, b"c" * (SMALL_BYTES + 1), b"d" * 20_000)


def results(group_id: str) -> list[pb.TrajectoryResult]:
    """Two trajectories with payloads of all sizes, one with two outputs without any between."""
    first = [output(payload=DATA[0]), output(), output(payload=DATA[3]), output(payload=DATA[1])]
    second = [output(payload=DATA[2]), output(payload=DATA[4])]
    return [result(group_id, 0, *first), result(group_id, 1, *second)]


def refs_of(groups: list[pb.SampledGroup]) -> list[pb.PayloadRef]:
    """The references of a batch in order."""
    outputs = [out for group in groups for entry in group.trajectories for out in entry.outputs]
    assert not [out for out in outputs if out.payload.WhichOneof("source") == "inline"]
    return [out.payload.ref for out in outputs if out.HasField("payload")]


async def check(caller: Caller, *, groups: int, step: int = 0) -> str:
    """Sample and read all payloads; returns the lease."""
    told = await caller.sample(groups, step=step)
    assert told.outcome == "REACHED"
    refs = refs_of(told.groups)
    expected = [DATA[number] for number in (0, 3, 1, 2, 4)] * groups
    assert [ref.size for ref in refs] == [len(data) for data in expected]
    assert len({ref.id for ref in refs}) == len(refs)
    lease_id: str = told.done.lease_id
    assert await caller.get(*refs, lease_id=lease_id) == expected
    assert await caller.get(refs[2], lease_id=lease_id) == [DATA[1]]
    return lease_id


@pytest.mark.parametrize("how", ["records", "snapshot"])
async def test_they_are_read_after_a_restart_and_counted(tmp_path: Path, how: str) -> None:
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=2)
        await caller.add("a", "b")
        await caller.finish(*results("a"), *results("b"))
        if how == "snapshot":
            await keeper_of(buffer).snapshot()
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        [run] = buffer.desk.runs
        total = 2 * sum(map(len, DATA))
        assert run.state.payloads.held == total
        again = await caller.finish(*results("a"))
        assert not [outcome for outcome in again if outcome.code], "the same result again is no other"
        lease_id = await check(caller, groups=2)
        await caller.commit(lease_id)
        if how == "snapshot":
            await keeper_of(buffer).snapshot()
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        [run] = buffer.desk.runs
        assert run.state.payloads.held == total
        released = pb.ReleasePayloadRequest(run_id=caller.place["run_id"], lease_id=lease_id)
        assert (await caller.stub.ReleasePayload(released)).bytes_released == total
        assert run.state.payloads.held == 0


async def test_they_come_back_with_a_checkpoint(tmp_path: Path) -> None:
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(size=2)
        await caller.open()
        await caller.add("a")
        await caller.finish(*results("a"))
        await caller.checkpoint("c", step=1)
        [info] = await caller.checkpoints()
        assert info.bytes == sum(map(len, DATA))
        lease_id = await check(caller, groups=1, step=1)
        await caller.commit(lease_id)
        await caller.restore("c")
        await check(caller, groups=1, step=1)


async def test_only_its_lease_opens_one() -> None:
    async with running_buffer() as buffer:
        caller = buffer.caller()
        await caller.create(size=2)
        await caller.add("a", "b")
        await caller.finish(*results("a"), *results("b"))
        first, second = await caller.sample(1), await caller.sample(1)
        mine, other = refs_of(first.groups)[2], refs_of(second.groups)[2]
        place = {"run_id": caller.place["run_id"], "lease_id": first.done.lease_id}
        for ref, reason in (
            (other, "PAYLOAD_NOT_IN_LEASE"),
            (pb.PayloadRef(id=mine.id + "0", size=1), "PAYLOAD_NOT_IN_LEASE"),
            (pb.PayloadRef(id="small-", size=1), "PAYLOAD_NOT_IN_LEASE"),
            (pb.PayloadRef(id=mine.id, size=2, crc32c=mine.crc32c), "PAYLOAD_MISMATCH"),
            (pb.PayloadRef(id=mine.id, size=mine.size, crc32c=mine.crc32c + 1), "PAYLOAD_MISMATCH"),
        ):
            error = await refused_stream(caller.stub.GetPayloads(pb.GetPayloadsRequest(**place, refs=[ref])))
            assert error.reason == reason
        request = pb.GetPayloadsRequest(**place, refs=[mine, refs_of(first.groups)[3]], resume_at=1 + SMALL_BYTES - 2)
        frames = [frame async for frame in caller.stub.GetPayloads(request)]
        assert b"".join(frame.chunk for frame in frames) == b"bb"
        shown = (await caller.group("b")).trajectories[0].outputs[3].payload.ref
        assert shown == other
        await caller.stub.ReleaseSample(pb.ReleaseSampleRequest(**place))
        error = await refused_stream(caller.stub.GetPayloads(pb.GetPayloadsRequest(**place, refs=[mine])))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "LEASE_RELEASED")
