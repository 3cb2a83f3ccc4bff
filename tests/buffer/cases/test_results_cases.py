"""Public reports on results that were empty, poisoned, late, repeated, aborted or hopeless."""

from __future__ import annotations

import google_crc32c
import pytest
from google.protobuf import json_format

from services.runtime.errors import Code
from tests.buffer.helpers import Buffer, Caller, output, refused, refused_stream, result, running_buffer
from turnout.buffer.v1 import buffer_pb2 as pb


async def one(caller: Caller, item: pb.TrajectoryResult) -> tuple[Code, str]:
    [outcome] = await caller.finish(item)
    return Code(outcome.code), outcome.reason


async def test_h02_an_empty_completion_is_no_completion(caller: Caller) -> None:
    """A group counted as finished although one of its sessions had produced nothing."""
    await caller.create(size=4)
    await caller.open()
    await caller.add("g")
    await caller.finish(*[result("g", index) for index in range(3)])
    for outputs in ([], [pb.Output()], [pb.Output(segments=[pb.Segment(tokens=0)])], [output(), pb.Output()]):
        empty = pb.TrajectoryResult(group_id="g", index=3, outputs=outputs)
        assert await one(caller, empty) == (Code.INVALID_ARGUMENT, "EMPTY_TRAJECTORY")
    assert (await caller.depth()).sampleable == 0
    assert (await caller.sample(1)).outcome == "TIMED_OUT"
    await caller.finish(result("g", 3))
    told = await caller.sample(1)
    assert len(told.groups[0].trajectories) == 4


@pytest.mark.parametrize(
    "rewards",
    [(float("nan"), 1.0, 1.0, 1.0), (float("nan"),) * 4, (float("inf"),) * 4, (1.0, 1.0, 1.0, float("-inf")), (1e400,)],
)
async def test_h13_rewards_that_are_not_finite_leave_the_trajectory_running(
    caller: Caller, rewards: tuple[float, ...]
) -> None:
    """NaN poisons group statistics, and comparisons with it slip past every filter."""
    await caller.create(size=4, group_filter_metric="reward")
    await caller.add("g")
    [claim] = await caller.claim(4)
    for index, reward in enumerate(rewards):
        expected = (Code.OK, "") if reward == 1.0 else (Code.INVALID_ARGUMENT, "REWARD_NOT_FINITE")
        assert await one(caller, result("g", index, output(reward), token=claim.token)) == expected
    group = await caller.group("g")
    assert group.state == pb.GROUP_STATE_RUNNING
    for index, reward in enumerate(rewards):
        if reward != 1.0:
            assert group.trajectories[index].state == pb.TRAJECTORY_STATE_RUNNING
            assert await one(caller, result("g", index, output(0.5), token=claim.token)) == (Code.OK, "")


@pytest.mark.parametrize("text", ["1e400", '"NaN"', '"Infinity"', '"-Infinity"'])
async def test_h13_what_text_clients_write_is_refused_too(caller: Caller, text: str) -> None:
    """1e400 is infinite in a double, and JSON has words for what is no number."""
    await caller.create()
    await caller.add("g")
    try:
        output = json_format.Parse(f'{{"segments": [{{"tokens": 1}}], "rewards": {{"reward": {text}}}}}', pb.Output())
    except json_format.ParseError:
        return
    assert await one(caller, result("g", 0, output)) == (Code.INVALID_ARGUMENT, "REWARD_NOT_FINITE")
    assert (await caller.group("g")).trajectories[0].state == pb.TRAJECTORY_STATE_PENDING


async def test_h13_signed_zeros_are_equal_and_an_absent_reward_is_not_zero(caller: Caller) -> None:
    await caller.create(size=4, group_filter_metric="reward")
    await caller.open()
    await caller.finish_new("zeros", rewards=(0.0, -0.0, 0.0, -0.0))
    told = await caller.wait(1)
    assert [(count.reason, count.count) for count in told.done.evictions.by_reason] == [
        (pb.EVICTION_REASON_ZERO_VARIANCE, 1)
    ]
    await caller.add("absent")
    bare = pb.Output(segments=[pb.Segment(tokens=1)], rewards={"other": 0.0})
    assert await one(caller, result("absent", 0, bare)) == (Code.INVALID_ARGUMENT, "REWARD_MISSING")
    caller.partition = "val"
    await caller.add("absent", size=1)
    assert await one(caller, result("absent", 0, bare)) == (Code.OK, "")
    told = await caller.sample(1)
    assert dict(told.groups[0].trajectories[0].outputs[0].rewards) == {"other": 0.0}


async def test_h14_attempts_are_counted_in_total_and_a_hopeless_prompt_is_replaced_once(caller: Caller) -> None:
    """One rejected prompt was retried ten thousand times; elsewhere its hole was never refilled."""
    await caller.create(max_attempts=3)
    await caller.open()
    await caller.add("A")
    attempts = 0
    while claims := await caller.claim():
        attempts += 1
        assert claims[0].token.attempt == attempts
        await caller.fail(claims[0], error=f"failure {attempts}")
    assert attempts == 3
    [failed] = await caller.groups(pb.GROUP_STATE_FAILED)
    trajectory = failed.trajectories[0]
    assert (failed.group_id, trajectory.error, trajectory.used_attempts) == ("A", "failure 3", 3)

    # B has two trajectories: fail, fail, succeed for the one; fail, succeed for the other. Attempts are per trajectory.
    await caller.add("B", size=2)
    first, second = (await caller.claim())[0], (await caller.claim())[0]
    for kind in ("fail", "fail", "finish"):
        if kind == "fail":
            await caller.fail(first)
            [first] = await caller.claim()
        else:
            await caller.finish_claim(first)
    await caller.fail(second)
    [second] = await caller.claim()
    await caller.finish_claim(second)
    assert [entry.used_attempts for entry in (await caller.group("B")).trajectories] == [2, 1]

    await caller.finish_new(*[f"healthy{number}" for number in range(10)])
    told = await caller.sample(4)
    assert (told.outcome, told.ids) == ("REACHED", ["B", "healthy0", "healthy1", "healthy2"])
    assert [due.count for due in told.refills] == [1]
    assert (await caller.ledger()).credits_created == 1


async def test_h15_results_for_the_unknown_the_gone_the_sampled_and_the_settled(caller: Caller) -> None:
    """More rollouts were reported complete than were ever queued."""
    await caller.create(size=2, max_attempts=1)
    await caller.open()
    assert await one(caller, result("never", 0)) == (Code.NOT_FOUND, "GROUP_NOT_FOUND")
    await caller.add("evicted")
    await caller.evict("evicted")
    assert await one(caller, result("evicted", 0)) == (Code.NOT_FOUND, "GROUP_NOT_FOUND")

    await caller.add("g")
    for index in (2, -1):
        assert await one(caller, result("g", index)) == (Code.INVALID_ARGUMENT, "INDEX_OUT_OF_RANGE")
    assert await one(caller, result("g", 0)) == (Code.OK, ""), "finish before start: a caller with its own queue"
    assert await one(caller, result("g", 0)) == (Code.OK, "")
    assert await one(caller, result("g", 0, output(7.0))) == (Code.ALREADY_EXISTS, "TRAJECTORY_SETTLED")
    await caller.finish(result("g", 1))
    told = await caller.sample(1)
    assert told.ids == ["g"]
    assert await one(caller, result("g", 1, output(7.0))) == (Code.FAILED_PRECONDITION, "GROUP_SAMPLED")
    assert await one(caller, result("g", 1)) == (Code.OK, ""), "the same result again is harmless while it is there"
    await caller.commit(told.done.lease_id)
    assert await one(caller, result("g", 1)) == (Code.NOT_FOUND, "GROUP_NOT_FOUND")

    await caller.add("failed")
    [claim] = await caller.claim(2)
    await caller.fail(claim)
    late = result("failed", 1, token=claim.token)
    assert await one(caller, late) == (Code.FAILED_PRECONDITION, "GROUP_FAILED")
    counts = (await caller.depth()).counts
    assert (counts.failed, counts.finished, counts.running, counts.pending) == (1, 0, 0, 0)


async def test_h15_good_items_of_a_batch_are_applied_beside_bad_ones(caller: Caller) -> None:
    await caller.create(size=2)
    await caller.add("g")
    outcomes = await caller.finish(result("g", 0), result("nope", 0), result("g", 5), result("", 0), result("g", 1))
    assert [(outcome.code, outcome.reason) for outcome in outcomes] == [
        (0, ""),
        (5, "GROUP_NOT_FOUND"),
        (3, "INDEX_OUT_OF_RANGE"),
        (3, "BAD_ID"),
        (0, ""),
    ]
    assert outcomes[2].metadata["value"] == "5"
    assert (await caller.depth()).sampleable == 1


@pytest.mark.parametrize(
    "ends",
    [
        (pb.SEGMENT_END_ABORTED, pb.SEGMENT_END_COMPLETED),
        (pb.SEGMENT_END_COMPLETED, pb.SEGMENT_END_ABORTED),
        (pb.SEGMENT_END_ABORTED, pb.SEGMENT_END_ABORTED),
        (pb.SEGMENT_END_COMPLETED, pb.SEGMENT_END_CONTINUED),
    ],
)
async def test_h18_an_aborted_segment_anywhere_keeps_the_group_open(
    caller: Caller, ends: tuple[pb.SegmentEnd.ValueType, ...]
) -> None:
    """An abort flag one level deeper than expected was not seen, so the group was queued as complete."""
    await caller.create(size=2)
    await caller.add("g")
    await caller.finish(result("g", 1))
    nested = pb.Output(segments=[pb.Segment(tokens=3, end=end) for end in ends])
    assert await one(caller, result("g", 0, output(), nested)) == (Code.INVALID_ARGUMENT, "ABORTED_SEGMENT")
    assert (await caller.depth()).sampleable == 0
    assert (await caller.group("g")).trajectories[0].state == pb.TRAJECTORY_STATE_PENDING


async def test_h19_without_partial_rollout_aborted_tokens_are_gone(caller: Caller) -> None:
    """Aborted groups were put back with half-written tokens, so one sample mixed three model versions."""
    await caller.create(partial_rollout=False)
    await caller.open()
    await caller.add("g", step=3)
    [claim] = await caller.claim()
    await caller.add(step=4, end_of_prompts=True)
    half = pb.Output(segments=[pb.Segment(tokens=100, weight_version=2, end=pb.SEGMENT_END_CONTINUED)])
    await caller.fail(claim, pb.FAILURE_KIND_INTERRUPTED, [half])
    [claim] = await caller.claim()
    assert claim.born_step == 4
    assert not claim.trajectories[0].HasField("partial")


async def test_h19_with_partial_rollout_segments_add_up_and_the_group_keeps_its_birth(caller: Caller) -> None:
    await caller.create(partial_rollout=True)
    await caller.open()
    await caller.add("g", step=3)
    written: list[pb.Segment] = []
    for version, tokens in ((2, 100), (4, 50)):
        [claim] = await caller.claim()
        kept = claim.trajectories[0].partial.outputs
        assert [segment.tokens for entry in kept for segment in entry.segments] == [part.tokens for part in written]
        written.append(pb.Segment(tokens=tokens, weight_version=version, end=pb.SEGMENT_END_CONTINUED))
        await caller.fail(claim, pb.FAILURE_KIND_INTERRUPTED, [pb.Output(segments=written)])
    [claim] = await caller.claim()
    assert (claim.born_step, claim.token.attempt) == (3, 3)
    written.append(pb.Segment(tokens=25, weight_version=6))
    await caller.finish_claim(claim, pb.Output(segments=written))
    told = await caller.sample(1, step=7)
    [segments] = [entry.segments for entry in told.groups[0].trajectories[0].outputs]
    assert [(segment.weight_version, segment.tokens) for segment in segments] == [(2, 100), (4, 50), (6, 25)]
    metrics = told.done.metrics
    assert metrics["training/off_policy/trajectory_spans/max"] == 5.0
    assert metrics["training/off_policy/trajectory_staleness/max"] == 0.0
    assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 4.0


async def test_h49_realistic_and_oversized_results(buffer: Buffer, caller: Caller) -> None:
    """Messages above 4 MiB are refused by default, in either direction, somewhere deep in the stack."""
    await caller.create()
    await caller.open()
    # 5 MB in one trajectory: not inline, which is said at once, but as an upload.
    big = bytes(5_000_000)
    await caller.add("big")
    assert await one(caller, result("big", 0, output(payload=big))) == (Code.INVALID_ARGUMENT, "PAYLOAD_TOO_LARGE")
    ref = (await caller.put(big, google_crc32c.value(big))).ref
    by_ref = pb.Output(segments=[pb.Segment(tokens=1)], payload=pb.Payload(ref=ref))
    assert await one(caller, result("big", 0, by_ref)) == (Code.OK, "")
    # Many small payloads in one message far above 4 MiB.
    names = [f"g{number:03}" for number in range(40)]
    await caller.add(*names)
    assert {
        outcome.code
        for outcome in await caller.finish(*[result(name, 0, output(payload=bytes(250_000))) for name in names])
    } == {0}
    told = await caller.sample(41)
    assert told.outcome == "REACHED"
    assert await caller.get(ref, lease_id=told.done.lease_id) == [big]
    # Ids of some megabytes in one call, and more of them than one call may bring.
    names = [f"missing{number}".ljust(500, ".") for number in range(4096)]
    assert (await caller.evict(*names)).missing == 4096
    error = await refused(caller.evict(*[f"missing{number}" for number in range(1_000_000)]))
    assert (error.code, error.reason, error.metadata["limit"]) == (Code.INVALID_ARGUMENT, "TOO_MANY_ITEMS", "4096")


async def test_h49_over_the_limit_nothing_is_consumed(caller: Caller, buffer: Buffer) -> None:
    await caller.create()
    await caller.add("g")
    limit = buffer.host.settings.max_message_bytes
    request = pb.EvictGroupsRequest(**caller.place, group_ids=["g"], request_id="x" * limit)
    error = await refused(caller.stub.EvictGroups(request))
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert (await caller.depth()).counts.pending == 1


async def test_h49_a_large_manifest_comes_in_parts_for_a_client_with_the_default_limit(caller: Caller) -> None:
    """The channel of this test accepts 4 MiB, as every gRPC client does by default; the manifest has 20 MB."""
    await caller.create()
    await caller.open()
    names = [f"g{number:03}" for number in range(100)]
    await caller.add(*names)
    wide = pb.Output(segments=[pb.Segment(tokens=1)], tags={"note": "x" * 200_000})
    for name in names:
        assert await one(caller, result(name, 0, wide)) == (Code.OK, "")
    told = await caller.sample(100)
    assert (told.outcome, told.ids, told.done.group_count) == ("REACHED", names, 100)
    sizes = [event.ByteSize() for event in told.events]
    assert sum(sizes) > 20_000_000
    assert max(sizes) < 2 << 20


async def test_h49_a_manifest_that_fits_no_message_sends_the_batch_back() -> None:
    async with running_buffer(max_message_bytes=1 << 16) as buffer:
        caller = buffer.caller()
        await caller.create(size=40)
        await caller.open()
        await caller.add("g")
        for index in range(40):
            await caller.finish(result("g", index, pb.Output(segments=[pb.Segment(tokens=1)], tags={"t": "x" * 2000})))
        error = await refused_stream(caller.sample_call(1))
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "MANIFEST_TOO_LARGE")
        assert (await caller.depth()).sampleable == 1
