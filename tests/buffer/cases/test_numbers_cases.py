"""H58: numbers at their boundaries, over the wire and through the JSON mapping."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from google.protobuf.duration_pb2 import Duration

from services.runtime.errors import Code
from services.runtime.waits import MAX_WAIT_S
from tests.buffer.helpers import Buffer, Caller, refused, refused_stream, result
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import duration, seconds

LARGE = [2**31, 2**53 + 1, 2**63 - 1]


@pytest.mark.parametrize("number", LARGE)
async def test_h58_steps_versions_and_tokens_round_trip_exactly(caller: Caller, number: int) -> None:
    """A double in between, as every JavaScript number is one, loses the last bits from 2**53 on."""
    await caller.create()
    await caller.open()
    await caller.add("g", step=number)
    output = pb.Output(
        prompt_tokens=number, segments=[pb.Segment(tokens=number, weight_version=number)], rewards={"reward": 1.0}
    )
    [outcome] = await caller.finish(result("g", 0, output))
    assert outcome.code == 0
    group = await caller.group("g")
    assert group.born_step == number
    assert (await caller.depth(number)).step == number
    told = await caller.sample(1, step=number)
    assert told.groups[0].born_step == number
    [back] = told.groups[0].trajectories[0].outputs
    segment = back.segments[0]
    assert (back.prompt_tokens, segment.tokens, segment.weight_version) == (number, number, number)
    run = (await caller.stub.GetRun(pb.GetRunRequest(run_id=caller.run_id))).run
    assert run.current_step == number


@pytest.mark.parametrize("number", [*LARGE, -1, -(2**63)])
def test_h58_the_json_mapping_writes_64_bits_as_strings_and_reads_them_back(number: int) -> None:
    """JSON.parse makes a double of a bare number; the canonical mapping is a string, and documented so in the proto."""
    depth = pb.Depth(sampleable=number, step=number)
    text = json_format.MessageToJson(depth)
    assert json.loads(text)["step"] == str(number)
    assert json_format.Parse(text, pb.Depth()) == depth
    assert json_format.Parse(f'{{"step": "{number}"}}', pb.Depth()).step == number
    assert text_format.Parse(text_format.MessageToString(depth), pb.Depth()) == depth
    assert pb.Depth.FromString(depth.SerializeToString()) == depth


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_h58_what_does_not_fit_is_an_error_of_the_sender(number: int) -> None:
    """A value that wraps on the way arrives as something plausible and wrong."""
    with pytest.raises(ValueError, match="out of range"):
        pb.Depth(step=number)
    with pytest.raises(json_format.ParseError):
        json_format.Parse(f'{{"step": "{number}"}}', pb.Depth())


async def test_h58_the_size_of_a_group_is_bounded_before_anything_is_made(caller: Caller) -> None:
    """n = 2**31 wraps to a negative number in 32 bits, and n = 2**31 - 1 is some hundred gigabytes."""
    await caller.create()
    with pytest.raises(ValueError, match="out of range"):
        pb.GroupSpec(group_id="g", group_size=2**31)
    with pytest.raises(json_format.ParseError):
        json_format.Parse('{"groupSize": 2147483648}', pb.GroupSpec())
    for size in (2**31 - 1, 65_537, 0, -1, -(2**31)):
        error = await refused(caller.add("g", size=size))
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, "groups[0].group_size")
    assert (await caller.ledger()).added == 0


async def test_h58_depth_targets(caller: Caller) -> None:
    await caller.create()
    await caller.open()
    assert (await caller.wait(0, max_wait=None)).outcome == "REACHED", "at once"
    for target, code, reason in (
        (-1, Code.INVALID_ARGUMENT, "TARGET_OUT_OF_RANGE"),
        (-(2**31), Code.INVALID_ARGUMENT, "TARGET_OUT_OF_RANGE"),
        (2**31 - 1, Code.FAILED_PRECONDITION, "TARGET_ABOVE_CAPS"),
    ):
        for call in (caller.wait_call(target), caller.sample_call(target)):
            error = await refused_stream(call)
            assert (error.code, error.reason) == (code, reason)
    error = await refused_stream(caller.sample_call(0))
    assert error.reason == "TARGET_OUT_OF_RANGE"
    for step in (-1, -(2**63)):
        error = await refused_stream(caller.wait_call(0, step=step))
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, "step")
        assert (await refused(caller.add("g", step=step))).metadata["field"] == "step"


async def test_h58_times_to_wait(buffer: Buffer, caller: Caller) -> None:
    """Zero is once, less is an error, and what overflows a timer is cut to what a timer takes."""
    await caller.create()
    await caller.open()

    def wait(max_wait: Duration) -> Any:
        request = pb.WaitForSampleableRequest(**caller.place, epoch=1, step=0, target=1, max_wait=max_wait)
        return caller.stub.WaitForSampleable(request)

    assert (await caller.wait(1, max_wait=0.0)).outcome == "TIMED_OUT"
    for negative in (Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=-(2**63))):
        error = await refused_stream(wait(negative))
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, "max_wait")
    for huge in (Duration(seconds=10**18), Duration(seconds=2**63 - 1, nanos=999_999_999)):
        call = wait(huge)
        assert (await call.read()).HasField("progress")
        await buffer.until_parked(1)
        call.cancel()
        await buffer.until_parked(0)
    claim = pb.ClaimGroupsRequest(**caller.place, worker_id="w", max_wait=Duration(seconds=-1))
    assert (await refused(caller.stub.ClaimGroups(claim))).metadata["field"] == "max_wait"
    for text in ('"NaNs"', '"nan"', '"1e18s"', '"Infinitys"', "NaN"):
        with pytest.raises(json_format.ParseError):
            json_format.Parse(f'{{"maxWait": {text}}}', pb.WaitForSampleableRequest())
    with pytest.raises(text_format.ParseError):
        text_format.Parse("max_wait { seconds: nan }", pb.WaitForSampleableRequest())


def test_h58_the_client_s_durations_are_cut_and_not_wrapped() -> None:
    for value, expected in ((0.0, 0.0), (-1.0, 0.0), (1e18, MAX_WAIT_S), (float("inf"), MAX_WAIT_S), (1.5, 1.5)):
        assert seconds(duration(value)) == expected
    assert seconds(Duration(seconds=2**63 - 1)) == MAX_WAIT_S
    with pytest.raises(ValueError, match="NaN"):
        duration(float("nan"))


async def test_h58_lease_times_of_a_run(caller: Caller) -> None:
    for lease in (Duration(), Duration(seconds=-1), Duration(nanos=-1)):
        error = await refused(caller.create(lease_times=pb.LeaseTimes(claim=lease)))
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, "config.lease_times.claim")
    run = await caller.create(lease_times=pb.LeaseTimes(claim=Duration(seconds=10**18)))
    assert run.config.lease_times.claim.seconds == MAX_WAIT_S


async def test_h58_sums_of_large_counts_do_not_wrap(caller: Caller) -> None:
    """Two lengths of 2**63 - 1 add up to -2 in 64 bits."""
    largest = 2**63 - 1
    await caller.create(size=2)
    await caller.open()
    await caller.add("g", step=0)
    segments = [pb.Segment(tokens=largest, weight_version=largest), pb.Segment(tokens=largest, weight_version=0)]
    results = [result("g", index, pb.Output(segments=segments, rewards={"reward": 1.0})) for index in range(2)]
    assert {outcome.code for outcome in await caller.finish(*results)} == {0}
    told = await caller.sample(1, step=largest)
    assert told.outcome == "REACHED"
    metrics = told.done.metrics
    assert metrics["training/off_policy/trajectory_spans/max"] == float(2**63)
    assert all(value >= -1.0 for value in metrics.values())
    call = caller.stub.WatchGroups(pb.WatchGroupsRequest(run_id=caller.run_id, from_sequence=1))
    told_events = await call.read()
    assert isinstance(told_events, pb.WatchGroupsResponse)
    lengths = [length for event in told_events.events for length in event.lengths]
    call.cancel()
    assert lengths
    assert set(lengths) == {largest}, "cut to what the wire carries"
    ref = pb.PayloadRef(id="far", store="else", size=largest, crc32c=1)
    for name in ("a", "b"):
        await caller.add(name, step=0, size=1)
        output = pb.Output(segments=[pb.Segment(tokens=1)], payload=pb.Payload(ref=ref))
        outcomes = await caller.finish(result(name, 0, output))
        ref.id += "ther"
    # The cap of bytes bounds what is added, never what an admitted group finishes with.
    assert [outcome.code for outcome in outcomes] == [0]
    error = await refused(caller.add("c", step=0, prompt=b"x"))
    assert (error.reason, int(error.metadata["present"])) == ("CAP_BYTES", 2 * largest)
