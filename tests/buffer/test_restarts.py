"""What a restart brings back: everything that was answered, as it was."""

from __future__ import annotations

from pathlib import Path

import google_crc32c

from services.buffer.service import BufferService
from services.buffer.storage.keeper import Keeper
from tests.buffer.helpers import (
    Buffer,
    Caller,
    knowledge,
    output,
    result,
    running_buffer,
)
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
    flat = output(0.0)
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
    assert flat is not None
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
