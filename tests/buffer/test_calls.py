"""Calls over the wire that no case of the public reports touches: runs, claims, streams, payloads, pages, metrics."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from types import CoroutineType, FrameType
from typing import Any

import google_crc32c
import grpc.aio
import pytest
from prometheus_client import generate_latest

from services.buffer.servicers.results import BATCHES_AHEAD
from services.runtime.clock import ManualClock
from services.runtime.errors import Code
from services.runtime.journal.durable import Durable, Parcel
from services.runtime.statuses import from_rpc_error
from tests.buffer.helpers import (
    CALL_S,
    Buffer,
    Caller,
    output,
    refused,
    refused_stream,
    result,
    running_buffer,
    seconds,
)
from turnout.buffer.v1 import buffer_pb2 as pb


async def test_a_run_is_created_once_and_shown_with_its_defaults(caller: Caller) -> None:
    created = await caller.stub.CreateRun(pb.CreateRunRequest(run_id="run", config=pb.RunConfig()))
    again = await caller.stub.CreateRun(pb.CreateRunRequest(run_id="run", config=created.run.config))
    assert again == created, "what is read back is the same configuration"
    config = created.run.config
    assert (config.refill, config.partial_rollout, config.max_attempts, config.caps.max_groups) == (
        True,
        True,
        1,
        10**6,
    )
    assert not config.staleness.HasField("max_versions"), "unset is not 0"
    assert config.lease_times.claim == seconds(600)
    answer = await caller.stub.GetRun(pb.GetRunRequest(run_id="run"))
    assert (answer.run, answer.time_scale, bool(answer.incarnation)) == (created.run, 1.0, True)


async def test_a_run_follows_its_trainer(caller: Caller) -> None:
    await caller.create()
    await caller.open()
    await caller.add("a", step=5)
    run = (await caller.stub.GetRun(pb.GetRunRequest(run_id="run"))).run
    assert (run.epoch, run.current_step) == (1, 5)
    change = pb.RunConfig()
    change.CopyFrom(run.config)
    change.max_attempts = 4
    update = pb.UpdateRunRequest(run_id="run", epoch=1, config=change, request_id="u")
    updated = await caller.stub.UpdateRun(update)
    assert updated.run.config.max_attempts == 4
    assert await caller.stub.UpdateRun(update) == updated


async def test_opening_and_deleting_can_be_repeated(caller: Caller) -> None:
    """A retry after a lost answer must not fence the trainer off from itself."""
    await caller.create()
    request = pb.OpenEpochRequest(run_id="run", request_id="open")
    assert [(await caller.stub.OpenEpoch(request)).epoch for _ in range(2)] == [1, 1]
    delete = pb.DeleteRunRequest(run_id="run", epoch=1, request_id="delete")
    for _ in range(2):
        await caller.stub.DeleteRun(delete)
    assert (await refused(caller.depth())).reason == "RUN_NOT_FOUND"


async def test_a_repeated_claim_gets_the_claims_that_still_live(timed: Buffer, clock: ManualClock) -> None:
    caller = timed.caller()
    await caller.create(max_attempts=3, lease_times=pb.LeaseTimes(claim=seconds(10)))
    assert await caller.claim(request_id="r") == [], "an empty answer is tried anew"
    await caller.add("a", "b", "c")
    first = await caller.claim(2, request_id="s")
    await clock.advance(4.0)
    again = await caller.claim(2, request_id="s")
    assert [claim.token for claim in again] == [claim.token for claim in first]
    assert again[0].lease == seconds(6)
    assert (await refused(caller.claim(3, request_id="s"))).reason == "REQUEST_ID_REUSED"
    await caller.finish_claim(first[0])
    assert [claim.group_id for claim in await caller.claim(2, request_id="s")] == ["b"]
    await clock.advance(6.0)
    assert await caller.claim(2, request_id="s") == []


async def test_an_answer_of_claims_keeps_to_its_bytes(caller: Caller) -> None:
    """A worker with the default limit of 4 MiB must be able to ask for many trajectories of large prompts."""
    await caller.create()
    await caller.add(*[f"g{number:02}" for number in range(20)], prompt=bytes(250_000))
    request = pb.ClaimGroupsRequest(**caller.place, worker_id="w", max_trajectories=1000)
    answer = await caller.stub.ClaimGroups(request)
    assert 2 << 20 < answer.ByteSize() <= 3 << 20
    small = await caller.claim(1000, max_bytes=1)
    assert len(small) == 1, "one claim is always given"
    assert small[0].prompt.inline == bytes(250_000)


async def test_a_claim_brings_what_there_is_of_earlier_attempts(caller: Caller) -> None:
    await caller.create()
    await caller.add("a", prompt=b"question")
    [claim] = await caller.claim()
    await caller.fail(claim, pb.FAILURE_KIND_INTERRUPTED, [output(tokens=9, payload=b"half an answer")])
    [claim] = await caller.claim()
    [kept] = claim.trajectories[0].partial.outputs
    assert kept.segments[0].tokens == 9
    assert await caller.get(kept.payload.ref, claim=claim.token) == [b"half an answer"]
    error = await refused_stream(
        caller.stub.GetPayloads(
            pb.GetPayloadsRequest(run_id="run", claim=pb.ClaimToken(claim_id="x", attempt=1), refs=[kept.payload.ref])
        )
    )
    assert error.reason == "STALE_CLAIM"


async def test_a_put_of_bytes_that_are_no_frame_is_the_callers_fault(buffer: Buffer, caller: Caller) -> None:
    """Chunks are read by hand, so what is no message must be found there, too; extra fields are no fault."""
    await caller.create()
    header = pb.PutPayloadRequest(header=pb.PutPayloadHeader(run_id="run")).SerializeToString()
    end = pb.PutPayloadRequest(end=pb.PutPayloadEnd(crc32c=google_crc32c.value(b"x"))).SerializeToString()
    put: grpc.aio.StreamUnaryMultiCallable[bytes, bytes]
    put = buffer.channel.stream_unary("/turnout.buffer.v1.ReplayBuffer/PutPayload")
    answer = await put(iter([header, b"\x12\x01x\x38\x01", end]), timeout=CALL_S)
    assert pb.PutPayloadResponse.FromString(answer).ref.size == 1
    for torn in (b"\x12\x05four", b"\xff"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put(iter([header, torn, end]), timeout=CALL_S)
        assert from_rpc_error(caught.value).reason == "MALFORMED_REQUEST"


async def test_results_stream_in_numbered_batches(caller: Caller) -> None:
    await caller.create(size=2)
    await caller.add("a", "b")
    queue: asyncio.Queue[pb.FinishStreamRequest | None] = asyncio.Queue()

    async def send() -> AsyncIterator[pb.FinishStreamRequest]:
        while (frame := await queue.get()) is not None:
            yield frame

    call = caller.stub.FinishStream(send(), timeout=CALL_S)
    answers = aiter(call)
    await queue.put(pb.FinishStreamRequest(header=pb.FinishStreamHeader(**caller.place)))
    for sequence, items in ((3, [result("a", 0), result("nope", 0)]), (7, [result("a", 1)])):
        await queue.put(pb.FinishStreamRequest(batch=pb.FinishStreamBatch(sequence=sequence, results=items)))
        answer = await anext(answers)
        assert (answer.sequence, len(answer.outcomes)) == (sequence, len(items))
    assert (await caller.depth()).sampleable == 1
    await queue.put(None)
    assert [answer async for answer in call] == []
    # The same batches again, as after a torn stream: no second effect.
    again = frames(pb.FinishStreamHeader(**caller.place), [result("a", 0)], [result("a", 1)])
    outcomes = [answer.outcomes[0].code async for answer in caller.stub.FinishStream(again)]
    assert outcomes == [0, 0]
    assert (await caller.depth()).counts.finished == 1


async def test_batches_of_a_stream_are_settled_while_earlier_ones_are_stored(
    buffer: Buffer, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch at a time, the disk waits for the interpreter and the interpreter for the disk."""
    await caller.create(size=1)
    await caller.add(*"abcdefgh")
    parcel = Parcel()
    monkeypatch.setattr(buffer.desk, "promise", lambda: Durable(0, parcel))
    batches = frames(pb.FinishStreamHeader(**caller.place), *([result(name, 0)] for name in "abcdefgh"))
    call = caller.stub.FinishStream(batches, timeout=CALL_S)
    first = asyncio.ensure_future(anext(aiter(call)))
    while (await caller.depth()).counts.finished <= BATCHES_AHEAD:  # noqa: ASYNC110 - nobody tells of a depth
        await asyncio.sleep(0.01)
    assert not first.done(), "an answer left before what it tells was kept"
    await asyncio.sleep(0.05)
    assert (await caller.depth()).counts.finished == BATCHES_AHEAD + 1, "a stream must not run ahead without end"
    parcel.settle()
    assert (await first).sequence == 0
    assert [answer.sequence async for answer in call] == list(range(1, 8))


async def test_what_is_wrong_with_a_stream_is_told_behind_the_answers_to_what_was_right(caller: Caller) -> None:
    """A client that got the error first could not tell which of its batches were settled."""
    await caller.create(size=1)
    await caller.add("a", "b")

    async def send() -> AsyncIterator[pb.FinishStreamRequest]:
        async for frame in frames(pb.FinishStreamHeader(**caller.place), [result("a", 0)], [result("b", 0)]):
            yield frame
        yield pb.FinishStreamRequest()

    answers = aiter(caller.stub.FinishStream(send(), timeout=CALL_S))
    assert [(await anext(answers)).sequence for _ in range(2)] == [0, 1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(answers)
    assert from_rpc_error(caught.value).reason == "BAD_FRAME"


async def frames(
    header: pb.FinishStreamHeader, *batches: list[pb.TrajectoryResult]
) -> AsyncIterator[pb.FinishStreamRequest]:
    yield pb.FinishStreamRequest(header=header)
    for sequence, items in enumerate(batches):
        yield pb.FinishStreamRequest(batch=pb.FinishStreamBatch(sequence=sequence, results=items))


async def test_an_open_finish_stream_ends_when_the_service_drains() -> None:
    async with running_buffer() as buffer:
        caller = buffer.caller()
        await caller.create()
        opened = asyncio.Event()

        async def send() -> AsyncIterator[pb.FinishStreamRequest]:
            yield pb.FinishStreamRequest(header=pb.FinishStreamHeader(**caller.place))
            yield pb.FinishStreamRequest(batch=pb.FinishStreamBatch(sequence=1))
            await asyncio.Event().wait()

        call = caller.stub.FinishStream(send())
        await anext(aiter(call))
        opened.set()
        ending = asyncio.create_task(refused_stream(call))
        await buffer.host.stop()
        error = await ending
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")


async def test_a_worker_settles_groups_under_any_epoch(caller: Caller) -> None:
    await caller.create(size=2)
    await caller.open()
    await caller.add("a", "b")
    await caller.finish(result("a", 0))
    finish = pb.FinishGroupRequest(**caller.place, group_id="a", request_id="f")
    assert [(await caller.stub.FinishGroup(finish)).finished_trajectories for _ in range(2)] == [1, 1]
    await caller.stub.FailGroup(pb.FailGroupRequest(**caller.place, group_id="b", epoch=1, error="bad"))
    told = await caller.sample(1)
    [group] = told.groups
    assert ([entry.index for entry in group.trajectories], group.group_size) == ([0], 2)
    assert [count.reason for count in told.done.evictions.by_reason] == [pb.EVICTION_REASON_FAILED]


async def test_payloads_round_trip_and_resume(caller: Caller) -> None:
    await caller.create()
    await caller.open()
    data = [bytes(range(256)) * 12_000, b"", b"tail"]
    refs = [(await caller.put(part, google_crc32c.value(part))).ref for part in data]
    await caller.add("a", "b", "c")
    outputs = [pb.Output(segments=[pb.Segment(tokens=1)], payload=pb.Payload(ref=ref)) for ref in refs]
    await caller.finish(*[result(name, 0, made) for name, made in zip("abc", outputs, strict=True)])
    told = await caller.sample(3)
    lease_id = told.done.lease_id
    assert await caller.get(*refs, lease_id=lease_id) == data
    cut = len(data[0]) - 100
    assert await caller.get(*refs, lease_id=lease_id, resume_at=cut) == [data[0][cut:], b"", b"tail"]
    assert await caller.get(*refs, lease_id=lease_id, resume_at=len(data[0]) + 2) == [b"il"]
    request = pb.GetPayloadsRequest(run_id="run", lease_id=lease_id, refs=refs)
    ends = [answer.end.crc32c async for answer in caller.stub.GetPayloads(request) if answer.HasField("end")]
    assert ends == [ref.crc32c for ref in refs]
    for resume_at, code in ((-1, Code.INVALID_ARGUMENT), (10**9, Code.OUT_OF_RANGE)):
        request.resume_at = resume_at
        assert (await refused_stream(caller.stub.GetPayloads(request))).code is code
    await caller.commit(lease_id)
    assert await caller.get(refs[2], lease_id=lease_id) == [b"tail"]
    release = pb.ReleasePayloadRequest(run_id="run", epoch=1, lease_id=lease_id)
    assert (await caller.stub.ReleasePayload(release)).bytes_released == sum(map(len, data))
    assert (await refused_stream(caller.stub.GetPayloads(pb.GetPayloadsRequest(run_id="run", lease_id=lease_id)))).code


async def test_an_upload_that_nobody_names_is_forgotten(timed: Buffer, clock: ManualClock) -> None:
    caller = timed.caller()
    await caller.create(lease_times=pb.LeaseTimes(payload=seconds(30)))
    answer = await caller.put(b"abc", google_crc32c.value(b"abc"))
    assert answer.lease == seconds(30)
    await clock.advance(30.0)
    await caller.add("a")
    made = pb.Output(segments=[pb.Segment(tokens=1)], payload=pb.Payload(ref=answer.ref))
    [outcome] = await caller.finish(result("a", 0, made))
    assert outcome.reason == "PAYLOAD_NOT_FOUND"


async def test_a_download_outlives_the_lease_it_began_under(timed: Buffer, clock: ManualClock) -> None:
    """Bytes that vanish half way would look like damage."""
    caller = timed.caller()
    await caller.create()
    await caller.open()
    data = bytes(24 << 20)
    ref = (await caller.put(data, google_crc32c.value(data))).ref
    await caller.add("a")
    await caller.finish(result("a", 0, pb.Output(segments=[pb.Segment(tokens=1)], payload=pb.Payload(ref=ref))))
    told = await caller.sample(1)
    call = caller.stub.GetPayloads(pb.GetPayloadsRequest(run_id="run", lease_id=told.done.lease_id, refs=[ref]))
    answers = aiter(call)
    await anext(answers)
    await clock.advance(600.0)
    await caller.evict("a")
    assert sum([len(answer.chunk) async for answer in answers]) == len(data)
    assert timed.desk.runs.require("run").state.payloads.held == 0


async def test_pages_follow_the_order_of_arrival(caller: Caller) -> None:
    await caller.create()
    await caller.add(*[f"g{number}" for number in range(7)])
    seen: list[str] = []
    token = ""
    while True:
        request = pb.ListGroupsRequest(**caller.place, page_size=3, page_token=token)
        answer = await caller.stub.ListGroups(request)
        seen += [group.group_id for group in answer.groups]
        token = answer.next_page_token
        if not token:
            break
    assert seen == [f"g{number}" for number in range(7)]
    await caller.finish(result("g3", 0))
    assert [group.group_id for group in await caller.groups(pb.GROUP_STATE_FINISHED)] == ["g3"]


async def test_a_page_fits_into_a_message_of_any_client(caller: Caller) -> None:
    await caller.create()
    names = [f"g{number:02}" for number in range(50)]
    await caller.add(*names)
    wide = pb.Output(segments=[pb.Segment(tokens=1)], tags={"note": "x" * 200_000})
    await caller.finish(*[result(name, 0, wide) for name in names])
    seen: list[str] = []
    token = ""
    while token or not seen:
        request = pb.ListGroupsRequest(**caller.place, page_size=1000, page_token=token)
        answer = await caller.stub.ListGroups(request)
        assert answer.ByteSize() < 4 << 20
        seen += [group.group_id for group in answer.groups]
        token = answer.next_page_token
    assert seen == names


async def test_a_group_tells_its_whole_story(caller: Caller) -> None:
    await caller.create(size=2)
    await caller.open()
    await caller.add("a", step=4)
    [claim] = await caller.claim(1)
    await caller.finish(result("a", 0, output(0.5, payload=b"bytes"), token=claim.token))
    group = await caller.group("a")
    assert (group.state, group.born_step, group.group_size, group.sequence) == (pb.GROUP_STATE_RUNNING, 4, 2, 1)
    done, waiting = group.trajectories
    assert (done.state, waiting.state) == (pb.TRAJECTORY_STATE_FINISHED, pb.TRAJECTORY_STATE_PENDING)
    assert done.outputs[0].payload.ref.size == 5
    assert group.added_at.seconds > 1_700_000_000


async def test_the_ledger_covers_all_partitions_together(buffer: Buffer, caller: Caller) -> None:
    await caller.create()
    await caller.add("a")
    await buffer.caller(partition="val").add("a", "b")
    ledger = await caller.stub.GetLedger(pb.GetLedgerRequest(run_id="run"))
    assert (ledger.added, ledger.present.pending) == (3, 3)


async def test_metrics_tell_depth_evictions_and_credits(buffer: Buffer, caller: Caller) -> None:
    await caller.create(group_filter_metric="reward")
    await caller.open()
    await caller.finish_new("flat", rewards=(1.0, 1.0))
    await caller.finish_new("a")
    await caller.wait(5)
    text = await asyncio.to_thread(lambda: generate_latest(buffer.host.context.metrics).decode())
    for line in (
        'turnout_buffer_groups{partition="train",run_id="run",state="finished"} 1.0',
        'turnout_buffer_sampleable{partition="train",run_id="run"} 1.0',
        'turnout_buffer_evictions_total{partition="train",reason="zero_variance",run_id="run"} 1.0',
        'turnout_buffer_refill_credits_total{kind="created",partition="train",run_id="run"} 1.0',
        'turnout_buffer_unpaid_credits{partition="train",run_id="run"} 1.0',
        'turnout_buffer_parked{run_id="run"} 0.0',
    ):
        assert line in text
    assert "turnout_buffer_groups" in generate_latest(buffer.host.context.metrics).decode()


@pytest.mark.parametrize("numbers", [(2**31, 2**53 + 1, 2**63 - 1)])
async def test_large_numbers_come_back_exact(caller: Caller, numbers: tuple[int, ...]) -> None:
    await caller.create(size=len(numbers))
    await caller.open()
    await caller.add("a", step=3)
    outputs = [pb.Output(segments=[pb.Segment(tokens=number, weight_version=number)] * 2) for number in numbers]
    await caller.finish(*[result("a", index, made) for index, made in enumerate(outputs)])
    told = await caller.sample(1, step=2**63 - 1)
    for entry, made in zip(told.groups[0].trajectories, outputs, strict=True):
        assert [segment.tokens for segment in entry.outputs[0].segments] == [
            segment.tokens for segment in made.segments
        ]
    events: list[Any] = []
    call = caller.stub.WatchGroups(pb.WatchGroupsRequest(run_id="run", from_sequence=1))
    events = list((await anext(aiter(call))).events)
    call.cancel()
    assert max(length for event in events for length in event.lengths) == 2**63 - 1, "sums are cut, never wrapped"


async def test_bytes_of_an_external_store_are_counted_up_to_what_fits(caller: Caller) -> None:
    """The sum of what was released did not fit into its field, and the release ended INTERNAL after it was done."""
    await caller.create(caps=pb.Caps(max_bytes=2**63 - 1))
    await caller.open()
    huge = pb.Payload(ref=pb.PayloadRef(id="key", store="ray", size=2**63 - 1))
    await caller.add("a")
    await caller.finish(result("a", 0, *[pb.Output(segments=[pb.Segment(tokens=1)], payload=huge)] * 2))
    told = await caller.sample(1)
    await caller.commit(told.done.lease_id)
    release = pb.ReleasePayloadRequest(run_id="run", epoch=1, lease_id=told.done.lease_id)
    assert (await caller.stub.ReleasePayload(release)).bytes_released == 2**63 - 1


async def test_what_is_kept_for_a_repeated_claim_keeps_no_group_alive() -> None:
    """Answers are kept for an hour: with groups in them the buffer grew by all that it ever handed out."""
    async with running_buffer() as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.add("a")
        (claim,) = await caller.claim(request_id="once")
        assert [again.token for again in await caller.claim(request_id="once")] == [claim.token]
        (held,) = buffer.desk.runs.require(caller.run_id).state.claims
        await caller.finish_claim(claim)
        assert not await caller.claim(request_id="once"), "the claim has ended"
        gc.collect()
        assert not [
            type(holder) for holder in gc.get_referrers(held) if not isinstance(holder, FrameType | CoroutineType)
        ]
