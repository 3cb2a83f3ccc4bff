"""Waits over the wire: what they say, how they end, and what happens around them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from services.buffer.service import BufferService
from services.runtime.clock import ManualClock
from services.runtime.errors import Code
from services.runtime.statuses import from_rpc_error
from tests.buffer.helpers import (
    CALL_S,
    Buffer,
    Caller,
    Told,
    output,
    refused,
    refused_stream,
    result,
    running_buffer,
    seconds,
    snapshot,
)
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.buffer.v1 import buffer_pb2_grpc


async def test_a_wait_begins_with_progress_and_ends_once(caller: Caller) -> None:
    await caller.create()
    await caller.finish_new("a", "b")
    told = await caller.wait(2)
    assert [event.WhichOneof("event") for event in told.events] == ["progress", "done"]
    assert told.events[0].progress.target == 2
    assert (told.outcome, told.done.depth.sampleable, told.done.reason) == ("REACHED", 2, "")
    told = await caller.wait(3)
    assert (told.outcome, told.done.depth.counts.finished) == ("TIMED_OUT", 2)
    assert "2 of 3 groups are sampleable" in told.done.reason


async def test_a_parked_wait_is_woken_by_the_finish_that_meets_it(buffer: Buffer, caller: Caller) -> None:
    await caller.create()
    await caller.add("a", "b")
    waiting = asyncio.create_task(caller.wait(2, max_wait=CALL_S))
    await buffer.until_parked(1)
    await caller.finish(result("a", 0))
    await caller.finish(result("b", 0))
    assert (await waiting).outcome == "REACHED"
    await buffer.until_parked(0)


async def test_a_wait_answers_before_the_deadline_of_its_call(caller: Caller) -> None:
    """A client with a 1 s deadline and no max_wait must get TIMED_OUT, not DEADLINE_EXCEEDED."""
    await caller.create()
    request = pb.WaitForSampleableRequest(run_id="run", partition="train", step=0, target=1)
    told = Told([event async for event in caller.stub.WaitForSampleable(request, timeout=1.0)])
    assert told.outcome == "TIMED_OUT"


async def test_progress_comes_after_changes_and_while_nothing_happens(timed: Buffer, clock: ManualClock) -> None:
    caller = timed.caller()
    await caller.create()
    call = caller.wait_call(5, max_wait=None, progress_interval=seconds(4.0))
    events = aiter(call)
    assert (await anext(events)).progress.depth.counts.finished == 0
    await caller.finish_new("a")
    assert (await anext(events)).progress.depth.counts.finished == 1
    await timed.until_parked(1)
    await clock.advance(4.0)
    assert (await anext(events)).WhichOneof("event") == "progress"
    call.cancel()
    await timed.until_parked(0)


async def test_a_trainer_refills_from_inside_its_wait(caller: Caller) -> None:
    await caller.create(group_filter_metric="reward")
    await caller.open()
    await caller.finish_new("flat", rewards=(1.0, 1.0))
    told = Told()
    async for event in caller.wait_call(1, max_wait=CALL_S):
        told.events.append(event)
        if event.WhichOneof("event") == "refill_due":
            answer = await caller.add("fresh", refill_claim_id=event.refill_due.refill_claim_id)
            assert answer.refill_remaining == 0
            await caller.finish(result("fresh", 0))
    assert told.outcome == "REACHED"
    assert [refill.count for refill in told.refills] == [1]
    evictions = told.done.evictions
    assert (evictions.evicted, dict(evictions.metrics)) == (1, {"training/filter_groups/evicted_samples": 1.0})
    again = await caller.wait(1, cursor=told.done.next_cursor)
    assert again.done.evictions.evicted == 0


async def test_who_only_watches_evicts_nothing_and_is_asked_for_nothing(caller: Caller) -> None:
    await caller.create(group_filter_metric="reward")
    await caller.open()
    await caller.finish_new("flat", rewards=(1.0, 1.0))
    told = await caller.wait(1, epoch=None)
    assert (told.outcome, told.refills) == ("TIMED_OUT", [])
    assert (await caller.ledger()).evicted == 0


async def test_while_no_epoch_was_opened_a_wait_without_one_is_the_trainers(caller: Caller) -> None:
    await caller.create(group_filter_metric="reward")
    await caller.finish_new("flat", rewards=(1.0, 1.0))
    told = await caller.wait(1)
    assert [refill.count for refill in told.refills] == [1]


async def test_a_new_trainer_ends_the_waits_of_the_old(buffer: Buffer) -> None:
    old, new = buffer.caller(), buffer.caller()
    await old.create()
    await old.open()
    calls = [old.wait_call(1, max_wait=CALL_S), old.sample_call(1, max_wait=CALL_S)]
    watching = asyncio.create_task(old.wait(1, max_wait=CALL_S, epoch=None))
    ended = [asyncio.create_task(refused_stream(call)) for call in calls]
    await buffer.until_parked(3)
    await new.open()
    for error in await asyncio.gather(*ended):
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "STALE_EPOCH")
        assert (error.metadata["value"], error.metadata["current"]) == ("1", "2")
    await new.finish_new("a")
    assert (await watching).outcome == "REACHED"


async def test_deleting_a_run_ends_what_is_parked_on_it(buffer: Buffer, caller: Caller) -> None:
    await caller.create()
    calls = [
        asyncio.create_task(refused_stream(caller.wait_call(1, max_wait=CALL_S))),
        asyncio.create_task(refused(caller.claim(max_wait=CALL_S))),
        asyncio.create_task(refused_stream(caller.stub.WatchDepth(pb.WatchDepthRequest(**caller.place)))),
        asyncio.create_task(refused_stream(caller.stub.WatchGroups(pb.WatchGroupsRequest(run_id="run")))),
    ]
    await buffer.until_parked(4)
    await caller.stub.DeleteRun(pb.DeleteRunRequest(run_id="run"))
    for error in await asyncio.gather(*calls):
        assert (error.code, error.reason) == (Code.NOT_FOUND, "RUN_NOT_FOUND")
    await caller.create()


async def test_draining_ends_what_is_parked() -> None:
    async with running_buffer() as buffer:
        caller = buffer.caller()
        await caller.create()
        calls = [
            asyncio.create_task(refused_stream(caller.wait_call(1, max_wait=CALL_S))),
            asyncio.create_task(refused_stream(caller.sample_call(1, max_wait=CALL_S))),
            asyncio.create_task(refused(caller.claim(max_wait=CALL_S))),
            asyncio.create_task(refused_stream(caller.stub.WatchDepth(pb.WatchDepthRequest(**caller.place)))),
            asyncio.create_task(refused_stream(caller.stub.WatchGroups(pb.WatchGroupsRequest(run_id="run")))),
        ]
        await buffer.until_parked(5)
        assert await buffer.host.stop()
        for error in await asyncio.gather(*calls):
            assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")


async def test_parked_calls_have_a_cap(buffer: Buffer, caller: Caller) -> None:
    await caller.create(caps=pb.Caps(max_parked_waits=2))
    calls = [caller.wait_call(1, max_wait=CALL_S) for _ in range(2)]
    waiting = [asyncio.create_task(anext(aiter(call))) for call in calls]
    await buffer.until_parked(2)
    for error in (
        await refused_stream(caller.wait_call(1, max_wait=CALL_S)),
        await refused(caller.claim(max_wait=CALL_S)),
        await refused_stream(caller.stub.WatchGroups(pb.WatchGroupsRequest(run_id="run"))),
    ):
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "CAP_PARKED_WAITS")
    await asyncio.gather(*waiting)
    for call in calls:
        call.cancel()
    await buffer.until_parked(0)
    assert (await caller.wait(0)).outcome == "REACHED"


async def test_a_look_is_not_refused_for_parked_calls(buffer: Buffer, caller: Caller) -> None:
    """With every slot taken, the Sample that would end the waits by its commit must not be refused for them."""
    await caller.create(caps=pb.Caps(max_parked_waits=1))
    parked = asyncio.create_task(caller.wait(2, max_wait=CALL_S))
    await buffer.until_parked(1)
    assert (await caller.sample(1)).outcome == "TIMED_OUT"
    assert (await caller.wait(1)).outcome == "TIMED_OUT"
    await caller.finish_new("a")
    assert (await caller.sample(1, auto_commit=True)).outcome == "REACHED"
    assert not parked.done()
    await caller.finish_new("b", "c")
    assert (await parked).outcome == "REACHED"


async def test_a_batch_that_nobody_heard_of_goes_back(buffer: Buffer, caller: Caller) -> None:
    """A trainer whose connection broke would otherwise hold groups until its lease ends, and it extends that itself."""
    await caller.create()
    await caller.open()
    call = caller.sample_call(1, max_wait=CALL_S)
    await anext(aiter(call))
    await buffer.until_parked(1)
    call.cancel()
    await buffer.until_parked(0)
    await caller.finish_new("a")
    assert (await caller.depth()).sampleable == 1
    told = await caller.sample(1)
    assert told.ids == ["a"]


class _NoDeadline:
    """As much of a call's context as a wait looks at."""

    def time_remaining(self) -> None:
        return None


@pytest.mark.parametrize("request_id", ["", "r"])
async def test_a_call_cut_while_its_batch_is_on_the_way(buffer: Buffer, caller: Caller, request_id: str) -> None:
    """Between the decision and the last message the caller may vanish: only a request_id lets it ask again."""
    await caller.create()
    await caller.open()
    await caller.finish_new("a")
    service = buffer.host.service
    assert isinstance(service, BufferService)
    request = pb.SampleRequest(**caller.place, epoch=1, step=0, batch=1, auto_commit=True, request_id=request_id)
    stream: Any = service.servicer.Sample(request, _NoDeadline())  # type: ignore[arg-type]
    assert (await anext(stream)).WhichOneof("event") == "progress"
    # A part of the batch comes encoded.
    assert pb.SampleResponse.FromString(await anext(stream)).groups.groups[0].group_id == "a"
    await stream.aclose()
    await buffer.until_parked(0)
    depth = await caller.depth()
    assert (depth.sampleable, depth.counts.sampled) == ((0, 1) if request_id else (1, 0))
    told = await caller.sample(1, request_id=request_id, auto_commit=True)
    assert told.ids == ["a"]
    assert (await caller.ledger()).committed == 1


async def test_a_sample_with_a_request_id_survives_a_broken_call(buffer: Buffer, caller: Caller) -> None:
    await caller.create()
    await caller.open()
    await caller.finish_new("a", "b")
    first = await caller.sample(1, request_id="r")
    again = await caller.sample(1, request_id="r", cursor=first.done.next_cursor, max_wait=1.0)
    assert (again.ids, again.done.lease_id) == (first.ids, first.done.lease_id)
    assert (await refused_stream(caller.sample_call(2, request_id="r"))).reason == "REQUEST_ID_REUSED"
    await caller.commit(first.done.lease_id)
    error = await refused_stream(caller.sample_call(1, request_id="r"))
    assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "ALREADY_COMMITTED")
    assert await caller.commit(error.metadata["lease_id"]) == ["a"]


async def test_released_groups_come_back_with_their_place_by_age(caller: Caller) -> None:
    await caller.create()
    await caller.open()
    await caller.finish_new("old", step=1)
    await caller.finish_new("new", step=2)
    told = await caller.sample(1, step=2)
    release = pb.ReleaseSampleRequest(run_id="run", epoch=1, lease_id=told.done.lease_id)
    for _ in range(2):
        assert list((await caller.stub.ReleaseSample(release)).group_ids) == ["old"]
    assert (await caller.sample(2, step=2)).ids == ["old", "new"]


async def test_an_unmet_sample_is_tried_anew_under_its_request_id(caller: Caller) -> None:
    await caller.create()
    assert (await caller.sample(1, request_id="r")).outcome == "TIMED_OUT"
    await caller.finish_new("a")
    assert (await caller.sample(1, request_id="r")).ids == ["a"]


async def test_take_and_forget_commits_as_it_hands_out(caller: Caller) -> None:
    await caller.create()
    await caller.add("a", prompt=b"question")
    await caller.finish(result("a", 0, output(payload=b"answer")))
    told = await caller.sample(1, auto_commit=True, request_id="r")
    assert (await caller.ledger()).committed == 1
    [ref] = [entry.payload.ref for entry in told.groups[0].trajectories[0].outputs]
    assert await caller.get(ref, lease_id=told.done.lease_id) == [b"answer"]
    assert (await caller.sample(1, auto_commit=True, request_id="r")).ids == ["a"]
    assert (await caller.ledger()).committed == 1


async def test_the_manifest_says_what_was_finished(caller: Caller) -> None:
    await caller.create()
    await caller.open()
    await caller.add("a", step=4, size=2)
    results = [
        pb.Output(
            prompt_tokens=7,
            segments=[
                pb.Segment(tokens=5, weight_version=2, end=pb.SEGMENT_END_CONTINUED, replica_id="r1"),
                pb.Segment(tokens=6, weight_version=3, replica_id="r2"),
            ],
            rewards={"reward": 0.5, "length": -1.0},
            tags={"turn": "1"},
        ),
        pb.Output(segments=[pb.Segment(tokens=1)]),
    ]
    await caller.finish(result("a", 0, *results), result("a", 1, results[1]))
    told = await caller.sample(1, step=4)
    [group] = told.groups
    assert (group.group_id, group.born_step, dict(group.tags), group.group_size) == ("a", 4, {"of": "a"}, 2)
    assert [trajectory.index for trajectory in group.trajectories] == [0, 1]
    first = group.trajectories[0].outputs[0]
    expected = pb.Output()
    expected.CopyFrom(results[0])
    expected.segments[1].end = pb.SEGMENT_END_COMPLETED
    assert first == expected
    assert not group.trajectories[1].outputs[0].segments[0].HasField("weight_version")
    assert told.done.metrics["training/off_policy/trajectory_spans/mean"] == 2.0
    assert told.done.metrics["training/off_policy/trajectory_staleness_worst/max"] == 1.0


async def test_depth_streams_coalesced(caller: Caller) -> None:
    await caller.create()
    call = caller.stub.WatchDepth(pb.WatchDepthRequest(**caller.place))
    depths = aiter(call)
    assert (await anext(depths)).depth.sampleable == 0
    await caller.finish_new(*[f"g{number}" for number in range(50)])
    seen = 0
    while seen < 50:
        seen = (await anext(depths)).depth.sampleable
    await caller.sample(1, step=3)
    latest = await anext(depths)
    while latest.depth.counts.sampled == 0 or latest.depth.step == 0:
        latest = await anext(depths)
    assert (latest.depth.step, latest.depth.sampleable) == (3, 49)
    call.cancel()


async def test_depth_is_told_at_most_once_per_interval(timed: Buffer, clock: ManualClock) -> None:
    caller = timed.caller()
    await caller.create()
    request = pb.WatchDepthRequest(**caller.place, step=0, min_interval=seconds(10.0))
    call = caller.stub.WatchDepth(request)
    depths = aiter(call)
    await anext(depths)
    await caller.finish_new("a")
    await caller.finish_new("b")
    following = asyncio.ensure_future(anext(depths))
    await timed.until_parked(1)
    assert not following.done()
    await clock.advance(10.0)
    assert (await following).depth.sampleable == 2
    call.cancel()


async def test_group_events_replay_and_follow(buffer: Buffer, caller: Caller) -> None:
    await caller.create(group_filter_metric="reward")
    await caller.open()
    await caller.add("a", size=2)
    [claim] = await caller.claim(2)
    request = pb.WatchGroupsRequest(run_id="run", from_sequence=1)
    call = caller.stub.WatchGroups(request)
    events: list[pb.GroupEvent] = []

    async def read_until(kind: pb.GroupEventKind.ValueType) -> None:
        async for answer in call:
            events.extend(answer.events)
            if any(event.kind == kind for event in answer.events):
                return

    await read_until(pb.GROUP_EVENT_KIND_STARTED)
    progress = pb.TrajectoryProgress(token=claim.token, group_id="a", index=1, done=40, engine_request_id="q")
    report = pb.ReportProgressRequest(**caller.place, progress=[progress])
    assert [outcome.code for outcome in (await caller.stub.ReportProgress(report)).outcomes] == [0]
    await read_until(pb.GROUP_EVENT_KIND_PROGRESS)
    await caller.finish(result("a", 0, output(1.0, 3), token=claim.token))
    await caller.finish(result("a", 1, output(1.0, 4), token=claim.token))
    await caller.wait(1)
    await read_until(pb.GROUP_EVENT_KIND_EVICTED)
    call.cancel()
    kinds = [pb.GroupEventKind.Name(event.kind).removeprefix("GROUP_EVENT_KIND_") for event in events]
    assert kinds == [
        "ADDED",
        "STARTED",
        "PROGRESS",
        "TRAJECTORY_FINISHED",
        "TRAJECTORY_FINISHED",
        "FINISHED",
        "EVICTED",
    ]
    assert [event.sequence for event in events] == [1, 2, 0, 3, 4, 5, 6]
    assert (events[2].done, events[2].index, events[2].engine_request_id, events[2].attempt) == (40, 1, "q", 1)
    assert (list(events[3].lengths), list(events[5].lengths)) == ([3], [3, 4])
    assert list(events[6].reasons) == [pb.EVICTION_REASON_ZERO_VARIANCE]
    listed = await caller.stub.ListGroups(pb.ListGroupsRequest(**caller.place))
    assert listed.event_sequence == 6


@pytest.mark.parametrize(("sequence", "reason"), [(-1, "OUT_OF_RANGE"), (5, "EVENTS_AHEAD")])
async def test_events_of_another_life_are_refused(caller: Caller, sequence: int, reason: str) -> None:
    await caller.create()
    request = pb.WatchGroupsRequest(run_id="run", from_sequence=sequence)
    assert (await refused_stream(caller.stub.WatchGroups(request))).reason == reason


async def test_waiting_workers_are_served_in_turn(buffer: Buffer, caller: Caller) -> None:
    """One prompt must wake one worker, and the work of several prompts must reach several."""
    await caller.create()
    waiting = [asyncio.create_task(caller.claim(max_wait=CALL_S, worker=f"w{number}")) for number in range(4)]
    await buffer.until_parked(4)
    await caller.add("a", "b", "c")
    done: set[asyncio.Task[list[pb.Claim]]] = set()
    pending = set(waiting)
    while len(done) < 3:
        newly, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED, timeout=CALL_S)
        assert newly, "work is there and workers wait"
        done |= newly
    assert sorted(claim.group_id for task in done for claim in task.result()) == ["a", "b", "c"]
    [late] = pending
    assert not late.done()
    await caller.add("d")
    assert [claim.group_id for claim in await late] == ["d"]


async def test_a_worker_that_left_does_not_swallow_the_work(buffer: Buffer, caller: Caller) -> None:
    await caller.create()
    request = pb.ClaimGroupsRequest(**caller.place, worker_id="gone", max_wait=seconds(CALL_S))
    gone = caller.stub.ClaimGroups(request)
    await buffer.until_parked(1)
    waiting = asyncio.create_task(caller.claim(max_wait=CALL_S))
    await buffer.until_parked(2)
    gone.cancel()
    await caller.add("a")
    assert [claim.group_id for claim in await waiting] == ["a"]


async def test_claims_expire_by_themselves(timed: Buffer, clock: ManualClock) -> None:
    caller = timed.caller()
    await caller.create(max_attempts=2, lease_times=pb.LeaseTimes(claim=seconds(30.0)))
    await caller.add("a")
    [claim] = await caller.claim()
    assert claim.lease == seconds(30.0)
    await clock.advance(20.0)
    renew = pb.RenewClaimsRequest(run_id="run", tokens=[claim.token, pb.ClaimToken(claim_id="nope", attempt=1)])
    outcomes = (await caller.stub.RenewClaims(renew)).outcomes
    assert [(outcome.code, outcome.reason) for outcome in outcomes] == [(0, ""), (9, "STALE_CLAIM")]
    await clock.advance(29.0)
    assert (await caller.group("a")).trajectories[0].worker_id == "w"
    waiting = asyncio.create_task(caller.claim(max_wait=CALL_S))
    await timed.until_parked(1)
    await clock.advance(1.0)
    [again] = await waiting
    assert again.token.attempt == 2
    trajectory = (await caller.group("a")).trajectories[0]
    assert (trajectory.attempt, trajectory.used_attempts, trajectory.error) == (2, 1, "the claim expired")


async def test_sample_leases_expire_unless_their_trainer_is_heard_of(timed: Buffer, clock: ManualClock) -> None:
    caller = timed.caller()
    await caller.create(lease_times=pb.LeaseTimes(sample=seconds(10.0)))
    await caller.open()
    await caller.finish_new("a")
    lease_id = (await caller.sample(1)).done.lease_id
    await clock.advance(8.0)
    renewed = await caller.stub.RenewEpoch(pb.RenewEpochRequest(run_id="run", epoch=1))
    assert renewed.renewed == 1
    await clock.advance(8.0)
    request = pb.RenewSampleRequest(run_id="run", epoch=1, lease_id=lease_id)
    assert (await caller.stub.RenewSample(request)).lease == seconds(10.0)
    await clock.advance(9.0)
    assert (await caller.depth()).counts.sampled == 1
    await clock.advance(1.0)
    assert (await caller.depth()).sampleable == 1
    error = await refused(caller.commit(lease_id))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "LEASE_EXPIRED")


async def test_leases_in_answers_are_wall_time() -> None:
    """A client sleeps on the wall clock, whatever the speed of the job's own."""
    async with running_buffer(time_scale=0.1) as buffer:
        caller = buffer.caller()
        await caller.create(lease_times=pb.LeaseTimes(claim=seconds(100.0), sample=seconds(200.0)))
        await caller.add("a", "b")
        [claim] = await caller.claim()
        assert 5.0 < claim.lease.ToTimedelta().total_seconds() <= 10.0
        await caller.finish(result("b", 0))
        told = await caller.sample(1)
        assert 10.0 < told.done.lease.ToTimedelta().total_seconds() <= 20.0
        answer = await caller.stub.GetRun(pb.GetRunRequest(run_id="run"))
        assert answer.time_scale == pytest.approx(0.1)


async def test_a_call_that_parks_is_no_progress_to_the_others(buffer: Buffer, caller: Caller) -> None:
    """A thousand waits that park one after the other would each tell all those before them that nothing happened."""
    await caller.create()
    waiting = [asyncio.create_task(caller.wait(1, max_wait=CALL_S, epoch=None))]
    await buffer.until_parked(1)
    parking = buffer.desk.parking(buffer.desk.runs.require("run")).partitions["train"]
    while parking.progress_timer is not None:  # noqa: ASYNC110 - a timer of the loop tells nobody
        await asyncio.sleep(0.01)
    waiting.append(asyncio.create_task(caller.wait(1, max_wait=CALL_S, epoch=None)))
    await buffer.until_parked(2)
    assert parking.progress_timer is None
    await caller.finish_new("a")
    assert {(await told).outcome for told in waiting} == {"REACHED"}


async def test_many_parked_waiters_cost_nothing(buffer: Buffer, caller: Caller) -> None:
    """100 waits parked on a quiet buffer must not be looked at until something happens."""
    await caller.create()
    waiting = [asyncio.create_task(caller.wait(1, max_wait=CALL_S, epoch=None)) for _ in range(100)]
    await buffer.until_parked(100)
    await asyncio.sleep(0.3)
    before, began = time.process_time(), time.monotonic()
    await asyncio.sleep(1.0)
    share = (time.process_time() - before) / (time.monotonic() - began)
    assert share < 0.2, "parked waiters are busy"
    await caller.finish_new("a")
    assert {(await told).outcome for told in waiting} == {"REACHED"}


def sync_trainer(target: str, evicted: list[int]) -> Iterator[str]:
    """A trainer with one thread: it can only refill from inside its wait. Every group it gets at first is worthless."""
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = buffer_pb2_grpc.ReplayBufferStub(channel)
        place: dict[str, Any] = {"run_id": "run", "partition": "train", "epoch": 1}
        groups = [pb.GroupSpec(group_id=f"first{number}", group_size=2) for number in range(8)]
        stub.AddGroups(pb.AddGroupsRequest(**place, step=1, groups=groups), timeout=CALL_S)
        yield "added"
        fresh = 0
        request = pb.SampleRequest(**place, step=1, batch=8, max_wait=seconds(CALL_S))
        for event in stub.Sample(request, timeout=CALL_S):
            kind = event.WhichOneof("event")
            if kind == "refill_due":
                due = event.refill_due
                specs = [
                    pb.GroupSpec(group_id=f"fresh{number}", group_size=2) for number in range(fresh, fresh + due.count)
                ]
                fresh += due.count
                stub.AddGroups(
                    pb.AddGroupsRequest(**place, step=1, groups=specs, refill_claim_id=due.refill_claim_id),
                    timeout=CALL_S,
                )
            elif kind == "done":
                evicted.append(event.done.evictions.evicted)
                yield pb.WaitOutcome.Name(event.done.outcome)


async def test_a_single_threaded_trainer_whose_every_group_is_evicted_does_not_deadlock(
    buffer: Buffer, caller: Caller
) -> None:
    await caller.create(group_filter_metric="reward")
    await caller.open()
    evicted: list[int] = []
    outcomes: list[str] = []
    trainer = threading.Thread(target=lambda: outcomes.extend(sync_trainer(buffer.host.target, evicted)))
    trainer.start()
    worthless = 8 * 3
    finished = 0
    async with asyncio.timeout(CALL_S):
        while len(outcomes) < 2:
            for claim in await caller.claim(64, max_wait=0.2):
                for item in claim.trajectories:
                    reward = 1.0 if finished < worthless * 2 else float(item.index)
                    await caller.finish(result(claim.group_id, item.index, output(reward), token=claim.token))
                    finished += 1
    await asyncio.to_thread(trainer.join)
    assert outcomes == ["added", "WAIT_OUTCOME_REACHED"]
    assert evicted == [worthless]
    ledger = await caller.ledger()
    assert (ledger.credits_created, ledger.credits_paid) == (worthless, worthless)


async def test_a_refusal_of_a_stream_names_its_field_and_changes_nothing(buffer: Buffer, caller: Caller) -> None:
    await caller.create()
    await caller.open()
    await caller.finish_new("a", step=1)
    before = snapshot(buffer)
    for call, field in (
        (caller.wait_call(-1, step=9), "target"),
        (caller.wait_call(1, step=-1), "step"),
        (caller.wait_call(1, step=9, cursor=5), "cursor"),
        (caller.wait_call(1, step=9, max_wait=-1.0), "max_wait"),
        (caller.wait_call(1, step=9, progress_interval=seconds(0.01)), "progress_interval"),
        (caller.wait_call(1, step=9, epoch=-1), "epoch"),
        (caller.sample_call(0, step=9), "batch"),
        (caller.sample_call(1, step=9, request_id="\n"), "request_id"),
        (caller.stub.Sample(pb.SampleRequest(**caller.place, epoch=1, batch=1)), "step"),
        (caller.stub.WaitForSampleable(pb.WaitForSampleableRequest(**caller.place, epoch=1)), "step"),
    ):
        error = await refused_stream(call)
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, field)
    for call in (caller.sample_call(1, step=9, epoch=2), caller.wait_call(1, step=9, epoch=2)):
        assert (await refused_stream(call)).reason == "UNKNOWN_EPOCH"
    assert snapshot(buffer) == before


async def test_status_details_reach_a_plain_client(caller: Caller) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.depth()
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason, error.metadata["field"]) == (Code.NOT_FOUND, "RUN_NOT_FOUND", "run_id")


async def test_progress_comes_at_most_every_two_seconds_and_never_after_the_end(
    timed: Buffer, clock: ManualClock
) -> None:
    """Hundreds of workers report by themselves: a scheduler that followed each would do nothing else. A report that
    came after its trajectory's end would have it run for ever."""
    caller = timed.caller()
    await caller.create()
    await caller.open()
    await caller.add("a", size=3)
    [claim] = await caller.claim(3)
    call: Any = caller.stub.WatchGroups(pb.WatchGroupsRequest(run_id="run", from_sequence=3))

    async def report(index: int, done: int) -> None:
        progress = [pb.TrajectoryProgress(token=claim.token, group_id="a", index=index, done=done)]
        await caller.stub.ReportProgress(pb.ReportProgressRequest(**caller.place, progress=progress))

    async def told() -> list[tuple[int, int]]:
        return [(event.index, event.done) for event in (await call.read()).events]

    reading = asyncio.ensure_future(told())
    while not reading.done():
        await report(0, 1)
        await asyncio.sleep(0.01)
    assert await reading == [(0, 1)]
    for done in (2, 3, 4):
        await report(0, done)
        await report(1, 10 * done)
        await report(2, 5)
    await caller.finish(result("a", 2, output(1.0, 3), token=claim.token))
    finished = await call.read()
    assert [event.kind for event in finished.events] == [pb.GROUP_EVENT_KIND_TRAJECTORY_FINISHED]
    reading = asyncio.ensure_future(told())
    await caller.depth()
    assert not reading.done()
    await clock.advance(2.0)
    assert await reading == [(0, 4), (1, 40)]
    call.cancel()
