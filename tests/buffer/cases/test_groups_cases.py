"""Public reports on staleness, eviction, identity and isolation of groups."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from services.buffer.service import BufferService
from services.runtime.errors import Code, TurnoutError
from services.runtime.statuses import from_rpc_error
from tests.buffer.helpers import Buffer, Caller, output, refused, result, running_buffer
from turnout.buffer.v1 import buffer_pb2 as pb


async def test_h05_staleness_boundary_future_and_unset(buffer: Buffer) -> None:
    """Stale-drop rules are easy to get wrong by one at the boundary, and for values that are not set."""
    caller = buffer.caller()
    await caller.create(staleness=pb.Staleness(max_versions=2))
    await caller.open()
    for born in (3, 4, 5, 6):
        await caller.finish_new(f"born{born}", step=born)
    assert (await caller.depth(5)).sampleable == 3, "the group of the future is kept, the one of step 3 is stale"
    assert (await caller.depth(6)).sampleable == 2
    assert (await caller.depth(4)).sampleable == 4
    told = await caller.wait(2, step=6)
    assert (told.outcome, told.done.evictions.evicted) == ("REACHED", 2)
    assert told.done.evictions.metrics["training/off_policy/evicted_samples_staleness/max"] == 4.0
    assert told.done.evictions.metrics["training/off_policy/evicted_samples_staleness/min"] == 3.0
    told = await caller.sample(2, step=6)
    assert told.ids == ["born5", "born6"]

    unset = buffer.caller("unset")
    await unset.create()
    await unset.open()
    await unset.finish_new("ancient", step=0)
    assert (await unset.depth(10_000)).sampleable == 1
    assert (await unset.sample(1, step=10_000)).ids == ["ancient"]


async def test_h05_at_every_step_the_depth_is_what_sample_hands_out(buffer: Buffer) -> None:
    for step in (5, 6, 7):
        caller = buffer.caller(f"at{step}")
        await caller.create(staleness=pb.Staleness(max_versions=2))
        for born in (3, 4, 5, 6):
            await caller.finish_new(f"born{born}", step=born)
        depth = (await caller.depth(step)).sampleable
        assert (await caller.wait(depth, step=step)).outcome == "REACHED"
        assert (await caller.sample(depth + 1, step=step)).outcome == "TIMED_OUT"
        assert len((await caller.sample(depth, step=step)).ids) == depth


async def test_h12_several_reasons_are_one_eviction_and_one_refill(caller: Caller) -> None:
    """Treating reasons separately would evict and replace a group more than once."""
    await caller.create(group_filter_metric="reward", staleness=pb.Staleness(max_versions=1))
    await caller.open()
    await caller.add("many", size=3, step=1)
    claims = await caller.claim(2) + await caller.claim(1)
    await caller.finish_claim(claims[0], output(1.0))
    # The third session gives nothing; the caller accepts the group without it.
    await caller.stub.FinishGroup(pb.FinishGroupRequest(**caller.place, group_id="many"))
    await caller.add("failed", step=1)
    [claim] = await caller.claim()
    await caller.fail(claim, pb.FAILURE_KIND_PERMANENT)
    told = await caller.wait(1, step=9)
    assert (told.done.evictions.evicted, [due.count for due in told.refills]) == (2, [2])
    assert {count.reason: count.count for count in told.done.evictions.by_reason} == {
        pb.EVICTION_REASON_STALE: 1,
        pb.EVICTION_REASON_ZERO_VARIANCE: 1,
        pb.EVICTION_REASON_FAILED: 1,
    }
    for _ in range(2):
        told = await caller.wait(1, step=9, cursor=told.done.next_cursor)
        assert told.done.evictions.evicted == 0
    ledger = await caller.ledger()
    assert (ledger.evicted, ledger.credits_created) == (2, 2)


async def test_h16_a_group_is_its_id_and_nothing_else(caller: Caller) -> None:
    """Grouping by prompt content split siblings into singletons or merged unrelated groups."""
    await caller.create(size=4)
    await caller.open()
    await caller.add("first", "second", prompt=b"the same prompt")
    await caller.add("next epoch", prompt=b"the same prompt", step=9)
    results = [
        result(name, index, pb.Output(segments=[pb.Segment(tokens=1)], tags={"prompt": f"text {index} of {name}"}))
        for index in range(4)
        for name in ("first", "second", "next epoch")
    ]
    assert {outcome.code for outcome in await caller.finish(*results)} == {0}
    told = await caller.sample(3, step=9)
    assert told.ids == ["first", "second", "next epoch"]
    for group in told.groups:
        assert dict(group.tags) == {"of": group.group_id}
        labels = [trajectory.outputs[0].tags["prompt"] for trajectory in group.trajectories]
        assert labels == [f"text {index} of {group.group_id}" for index in range(4)]


async def test_h17_two_producers_of_the_same_ids(buffer: Buffer) -> None:
    """Ids sequential per producer overwrote each other's records."""
    first, second = buffer.caller(), buffer.caller()
    await first.create()

    async def produce(caller: Caller, prompt: bytes) -> list[str]:
        won = []
        for number in range(100):
            try:
                await caller.add(str(number), prompt=prompt)
                won.append(str(number))
            except grpc.aio.AioRpcError:
                won.append("")
            await asyncio.sleep(0)
        return won

    wins = await asyncio.gather(produce(first, b"of the first"), produce(second, b"of the second"))
    assert [bool(a) + bool(b) for a, b in zip(*wins, strict=True)] == [1] * 100
    assert len(await first.groups()) == 100
    claims = await first.claim(100)
    prompts = {claim.group_id: claim.prompt.inline for claim in claims}
    assert prompts == {str(number): b"of the first" if wins[0][number] else b"of the second" for number in range(100)}
    error = await refused(first.add("7"))
    assert (error.code, error.reason, error.metadata["value"]) == (Code.ALREADY_EXISTS, "GROUP_EXISTS", "7")


async def test_h17_an_add_is_idempotent_by_its_request_id(caller: Caller) -> None:
    await caller.create()
    first = await caller.add("a", "b", prompt=b"p", request_id="token")
    assert await caller.add("a", "b", prompt=b"p", request_id="token") == first
    error = await refused(caller.add("a", "b", prompt=b"q", request_id="token"))
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED")
    assert (await caller.ledger()).added == 2
    # The id is scoped to its call.
    await caller.stub.EvictGroups(pb.EvictGroupsRequest(**caller.place, group_ids=["a"], request_id="token"))


async def test_h20_evictions_race_and_repeat_without_errors(caller: Caller) -> None:
    """Deleting missing keys raised, and an ordinary race of reader against cleaner filled logs with errors."""
    await caller.create()
    await caller.open()
    await caller.add("a", "b", "c")
    for ids, evicted, missing in (
        ([], 0, 0),
        (["missing"], 0, 1),
        (["c", "c"], 1, 0),
        (["a", "missing", "b"], 2, 1),
        (["a", "b"], 0, 2),
    ):
        answer = await caller.evict(*ids)
        assert (answer.evicted, answer.missing, answer.sampled) == (evicted, missing, 0)
    await caller.finish_new("held")
    told = await caller.sample(1)
    assert (await caller.evict("held")).sampled == 1
    assert await caller.commit(told.done.lease_id) == ["held"]

    names = [f"g{number}" for number in range(50)]
    await caller.add(*names)

    async def read(name: str) -> Code:
        try:
            await caller.group(name)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).code
        return Code.OK

    found = await asyncio.gather(*[read(name) for name in names * 2], caller.evict(*names))
    assert set(found[:-1]) <= {Code.OK, Code.NOT_FOUND}


async def test_h20_evicting_from_a_partition_that_does_not_exist_finds_all_missing(caller: Caller) -> None:
    """A cleaner that repeats itself, or comes late, must not fail; what is not there is not there."""
    await caller.create()
    await caller.open()
    nowhere = caller.place | {"partition": "nowhere"}
    for request_id in ("", "again", "again"):
        request = pb.EvictGroupsRequest(**nowhere, epoch=1, group_ids=["a", "b", "a"], request_id=request_id)
        answer = await caller.stub.EvictGroups(request)
        assert (answer.evicted, answer.missing, answer.sampled) == (0, 2, 0)
    run = (await caller.stub.GetRun(pb.GetRunRequest(run_id=caller.run_id))).run
    assert [partition.name for partition in run.config.partitions] == ["train", "val"]


async def test_h20_expected_races_leave_no_error_in_the_log(caller: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    """Readers lost against the cleaner filled the logs with tracebacks."""
    await caller.create()
    await caller.open()
    names = [f"g{number}" for number in range(100)]
    await caller.add(*names)
    readers = [caller.group(name) for name in names]
    with capture_logs() as logs:
        found = await asyncio.gather(caller.evict(*names), *readers, caller.evict(*names), return_exceptions=True)
    errors = [from_rpc_error(error).code for error in found if isinstance(error, grpc.aio.AioRpcError)]
    assert set(errors) <= {Code.NOT_FOUND}
    assert (await refused(caller.group("g0"))).code is Code.NOT_FOUND
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert not [line for line in logs if line["log_level"] not in ("debug", "info")]


async def test_h21_partitions_share_nothing(buffer: Buffer) -> None:
    """Two partitions shared one status array, so progress in one showed up in the other."""
    train, val = buffer.caller(partition="train"), buffer.caller(partition="val")
    await train.create()
    for caller in (train, val):
        await caller.add("a", "b", "c")
    await train.finish(result("a", 0))
    assert [(await caller.depth()).sampleable for caller in (train, val)] == [1, 0]
    await val.evict("b")
    assert [(await caller.ledger()).evicted for caller in (train, val)] == [0, 1]
    assert [len(await caller.groups()) for caller in (train, val)] == [3, 2]
    await val.finish(result("a", 0), result("c", 0))
    assert [(await caller.depth()).sampleable for caller in (train, val)] == [1, 2]
    other = buffer.caller(partition="nowhere")
    for call in (other.depth(), other.groups(), other.group("a"), other.add("a"), other.claim()):
        error: TurnoutError = await refused(call)
        assert (error.code, error.reason) == (Code.NOT_FOUND, "PARTITION_NOT_FOUND")
    run = (await train.stub.GetRun(pb.GetRunRequest(run_id="run"))).run
    assert [partition.name for partition in run.config.partitions] == ["train", "val"]


async def test_h21_runs_share_nothing(buffer: Buffer) -> None:
    one, other = buffer.caller("one"), buffer.caller("other")
    for caller in (one, other):
        await caller.create()
        await caller.add("a")
    await one.open()
    await one.finish(result("a", 0))
    assert [(await caller.depth()).sampleable for caller in (one, other)] == [1, 0]
    [claim] = await other.claim()
    one_claim = pb.RenewClaimsRequest(run_id="one", tokens=[claim.token])
    assert [outcome.reason for outcome in (await one.stub.RenewClaims(one_claim)).outcomes] == ["STALE_CLAIM"]


async def test_h22_validation_is_neither_dropped_nor_filtered_nor_refilled(buffer: Buffer) -> None:
    """Validation data must come back whole, however old, equal or failed."""
    val = buffer.caller(partition="val")
    await val.create(group_filter_metric="reward", staleness=pb.Staleness(max_versions=1), max_attempts=1)
    await val.open()
    await val.finish_new(*[f"v{number}" for number in range(6)], step=1, rewards=(1.0, 1.0))
    await val.add("f0", "f1", step=1)
    for claim in await val.claim(2):
        await val.fail(claim, pb.FAILURE_KIND_PERMANENT, error="no answer")
    told = await val.sample(8, step=21)
    assert (told.outcome, told.refills, told.done.evictions.evicted) == ("REACHED", [], 0)
    assert told.ids == [*[f"v{number}" for number in range(6)], "f0", "f1"]
    assert [(group.failed, group.error) for group in told.groups[-2:]] == [(True, "no answer")] * 2
    assert [len(group.trajectories) for group in told.groups] == [2] * 6 + [0] * 2
    assert dict(told.done.metrics) == {}
    ledger = await val.ledger()
    assert (ledger.evicted, ledger.credits_created) == (0, 0)


async def intake(caller: Caller, *, paused: bool, request_id: str = "") -> bool:
    """Pause or resume intake; whether it was paused."""
    request = pb.SetIntakeRequest(**caller.place, epoch=caller.epoch, paused=paused, request_id=request_id)
    return (await caller.stub.SetIntake(request)).was_paused


async def test_h22_paused_intake_lets_no_add_and_no_start_slip_through(buffer: Buffer) -> None:
    """A wake-up after a refit got past the pause check, and training work ran into the validation."""
    caller, val = buffer.caller(), buffer.caller(partition="val")
    await caller.create(size=2, staleness=pb.Staleness(max_versions=1))
    val.epoch = await caller.open()
    await caller.add("before", "waiting", step=1)
    [running] = await caller.claim(2)
    parked = asyncio.create_task(caller.claim(4, max_wait=20, worker="parked"))
    [taken] = await parked
    await caller.finish_claim(taken)

    assert not await intake(caller, paused=True)
    assert await intake(caller, paused=True, request_id="twice")
    assert await intake(caller, paused=True, request_id="twice")
    await caller.fail(running, pb.FAILURE_KIND_INTERRUPTED)
    parked = asyncio.create_task(caller.claim(4, max_wait=20, worker="parked"))
    await buffer.until_parked(1)
    error = await refused(caller.add("late", step=2))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "INTAKE_PAUSED")
    assert await caller.claim(4) == []
    # The version advances: the stale group goes, nothing is refilled, nothing starts.
    told = await caller.wait(2, step=5)
    assert (told.outcome, told.refills, told.done.evictions.evicted) == ("TIMED_OUT", [], 1)
    assert "intake is paused" in told.done.reason
    assert await caller.claim(4) == []
    assert not parked.done()
    assert (await caller.depth()).intake_paused
    # Validation goes on meanwhile.
    await val.finish_new("v", rewards=(1.0, 1.0))
    assert (await val.sample(1)).ids == ["v"]
    assert not (await val.depth()).intake_paused

    assert await intake(caller, paused=False)
    assert [claim.group_id for claim in await parked] == ["before"]
    assert [due.count for due in (await caller.wait(2, step=5)).refills] == [1]
    await caller.add("late", step=5)


async def test_h22_a_pause_outlives_a_restart_and_a_restore(tmp_path: Path) -> None:
    """A buffer that comes back in the middle of a validation must not begin to hand out training work."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.open()
        await caller.add("a")
        await caller.checkpoint("open")
        await intake(caller, paused=True)
    for snapshot in (False, True):
        async with running_buffer(data_dir=tmp_path) as buffer:
            caller = buffer.caller()
            caller.epoch = 1
            assert await caller.claim() == []
            await caller.restore("open")
            assert await caller.claim() == []
            assert (await refused(caller.add("b"))).reason == "INTAKE_PAUSED"
            if not snapshot:
                service = buffer.host.service
                assert isinstance(service, BufferService)
                assert service.keeper is not None
                await service.keeper.snapshot()
