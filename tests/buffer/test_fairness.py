"""One run does not starve another: long work is bounded or done in slices, with room for others in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest

from services.buffer.domain import expiry
from services.buffer.domain import pump as pumping
from services.buffer.domain.config import MAX_GROUPS_PER_CALL, MAX_ITEMS_PER_CALL
from services.buffer.domain.expiry import EXPIRIES_PER_TURN, Expired
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import Partition
from services.buffer.domain.pump import EVICTIONS_PER_TURN
from services.buffer.domain.run import Run
from services.buffer.parking import WAKES_PER_TURN, Parked, wake_in_turns
from services.buffer.servicers.waits import GROUPS_PER_TURN
from services.buffer.servicers.work import MAX_CLAIMS
from services.runtime.clock import ManualClock
from services.runtime.errors import Code
from tests.buffer.domain.model import World, config
from tests.buffer.helpers import Buffer, Caller, refused, result, running_buffer, seconds
from tests.buffer.process import buffer_process
from turnout.buffer.v1 import buffer_pb2 as pb


async def fill(caller: Caller, count: int, *, finish: bool, first: int = 0, step: int = 0) -> list[str]:
    names = [f"g{number}" for number in range(first, first + count)]
    for start in range(0, count, 2000):
        some = names[start : start + 2000]
        await caller.add(*some, step=step)
        if finish:
            assert not any(outcome.code for outcome in await caller.finish(*[result(name, 0) for name in some]))
    return names


async def test_a_call_brings_a_bounded_number_of_items(caller: Caller) -> None:
    """A message of 64 MiB may hold a million ids, and every run would wait for all of them."""
    await caller.create()
    names = [f"g{number}" for number in range(MAX_GROUPS_PER_CALL + 1)]
    claim = pb.ClaimToken(claim_id="c", attempt=1)
    place = caller.place
    results = [result("g", 0)] * (MAX_ITEMS_PER_CALL + 1)
    failures = [pb.TrajectoryFailure(group_id="g", kind=pb.FAILURE_KIND_PERMANENT)] * (MAX_ITEMS_PER_CALL + 1)
    progress = [pb.TrajectoryProgress(group_id="g")] * (MAX_ITEMS_PER_CALL + 1)
    tokens = [claim] * (MAX_ITEMS_PER_CALL + 1)

    async def stream() -> None:
        frames = iter(
            [
                pb.FinishStreamRequest(header=pb.FinishStreamHeader(**place)),
                pb.FinishStreamRequest(batch=pb.FinishStreamBatch(sequence=1, results=results)),
            ]
        )
        async for _ in caller.stub.FinishStream(frames):
            pass

    for call in (
        caller.add(*names),
        caller.evict(*names),
        caller.finish(*results),
        stream(),
        caller.stub.FailTrajectories(pb.FailTrajectoriesRequest(**place, failures=failures)),
        caller.stub.ReportProgress(pb.ReportProgressRequest(**place, progress=progress)),
        caller.stub.RenewClaims(pb.RenewClaimsRequest(run_id=caller.run_id, tokens=tokens)),
    ):
        error = await refused(call)
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "TOO_MANY_ITEMS")
    assert (await caller.ledger()).added == 0
    await caller.add(*names[:-1])
    # More than is handed out at once is still handed out, to whoever comes again.
    claims = await caller.claim(65_536, max_bytes=1 << 30)
    assert len(claims) == MAX_CLAIMS
    assert len(await caller.claim(65_536, max_bytes=1 << 30)) == MAX_CLAIMS


def test_evictions_are_done_in_slices_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that makes a hundred thousand groups stale must not stop every other run while they leave."""
    monkeypatch.setattr(pumping, "EVICTIONS_PER_TURN", 10)
    world = World(config(max_versions=1))
    world.finish_new(*[f"g{number}" for number in range(25)], step=0)
    world.finish_new("fresh", step=5)
    _, end, pumped = world.wait(2, 5)
    slices = [len(pumped.evicted)]
    assert (end, pumped.more) == (None, True)
    assert world.depth(5) == 1, "what is due counts no more, gone or not"
    while pumped.more:
        pumped = world.pump()
        slices.append(len(pumped.evicted))
    assert slices == [10, 10, 0]
    assert world.partition.evictions.total.evicted == world.partition.refill.created == 25
    assert world.pump().evicted_at is None


async def test_sliced_evictions_are_told_and_recorded_as_if_they_were_one(tmp_path: Path) -> None:
    """A slice that a restart forgets, or does twice, breaks the ledger."""
    count = 2 * EVICTIONS_PER_TURN + 100
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create(staleness=pb.Staleness(max_versions=1))
        await caller.open()
        await fill(caller, count, finish=True)
        told = await caller.wait(1, step=5, max_wait=1.0)
        assert (told.outcome, told.done.evictions.evicted) == ("TIMED_OUT", count)
        assert sum(due.count for due in told.refills) == count
        ledger = await caller.ledger()
    async with running_buffer(data_dir=tmp_path) as buffer:
        assert await buffer.caller().ledger() == ledger


async def test_claims_that_end_together_end_in_slices(
    timed: Buffer, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claims of a whole fleet end at once when it dies."""
    caller = timed.caller()
    await caller.create(max_attempts=3, lease_times=pb.LeaseTimes(claim=seconds(5.0)))
    names = [f"g{number}" for number in range(2 * EXPIRIES_PER_TURN + 5)]
    await caller.add(*names)
    assert len(await caller.claim(len(names))) == len(names)
    turns: list[int] = []
    expire = expiry.expire

    def noted(run: Run, over: Expired, at: Moment) -> list[Partition]:
        turns.append(len(over.claims))
        return expire(run, over, at)

    monkeypatch.setattr(expiry, "expire", noted)
    await clock.advance(5.0)
    assert turns == [EXPIRIES_PER_TURN, EXPIRIES_PER_TURN, 5]
    assert (await caller.depth()).counts == pb.GroupCounts(pending=len(names))
    again = await caller.claim(len(names))
    assert {claim.token.attempt for claim in again} == {2}


async def test_a_large_manifest_is_whole(caller: Caller) -> None:
    """It is written in slices, between which anything may happen."""
    await caller.create()
    await caller.open()
    names = await fill(caller, 2 * GROUPS_PER_TURN + 1, finish=True)
    told = await caller.sample(len(names))
    assert told.ids == names
    assert told.done.group_count == len(names)


async def test_many_calls_are_woken_some_at_a_time() -> None:
    """A thousand readers of one run, all at work in one turn, would keep the calls of the others waiting."""
    parked = [Parked() for _ in range(3 * WAKES_PER_TURN + 1)]
    wake_in_turns(parked)
    awake: list[int] = []
    while not awake or awake[-1] < len(parked):
        awake.append(sum(call.wake.is_set for call in parked))
        await asyncio.sleep(0)
    assert awake == [WAKES_PER_TURN, 2 * WAKES_PER_TURN, 3 * WAKES_PER_TURN, 3 * WAKES_PER_TURN + 1]


async def longest_wait(caller: Caller, work: Awaitable[object]) -> float:
    """The longest that a depth query took while something else was at work, in seconds."""
    longest = 0.0
    working = asyncio.ensure_future(work)
    while not working.done():
        begun = time.perf_counter()
        await caller.depth()
        longest = max(longest, time.perf_counter() - begun)
        await asyncio.sleep(0.001)
    await working
    return longest


@pytest.mark.slow
async def test_a_huge_run_delays_the_depth_query_of_a_small_one_by_no_more_than_a_bound(tmp_path: Path) -> None:
    """Everything at once: a flood of adds and results, mass eviction, a thousand parked waits, a deletion.

    Without slices each of these took all of its seconds in one piece; the bound is ten times what a slice takes.
    """
    async with (
        buffer_process(tmp_path) as process,
        grpc.aio.insecure_channel(process.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        huge, small = process.caller("huge"), Caller(channel, "small")
        await huge.create(staleness=pb.Staleness(max_versions=1))
        await small.create()
        await huge.open()
        await small.finish_new("a")

        async def read(call: grpc.aio.UnaryStreamCall[object, object]) -> None:
            async for _ in call:
                pass

        async def parked() -> None:
            calls = [huge.wait_call(900_000, step=5, max_wait=2.0) for _ in range(1000)]
            await asyncio.gather(*map(read, calls), fill(huge, 1000, finish=True, first=900_000, step=5))

        async def delete() -> None:
            await huge.stub.DeleteRun(pb.DeleteRunRequest(run_id="huge", epoch=huge.epoch))

        works: dict[str, Callable[[], Awaitable[object]]] = {
            "a flood of adds and results": lambda: fill(huge, 40_000, finish=True),
            "eviction of 40 000 stale groups": lambda: huge.wait(1, step=5, max_wait=3.0),
            "a thousand parked waits": parked,
            "deletion": delete,
        }
        waits = {name: await longest_wait(small, work()) for name, work in works.items()}
    assert all(seconds < 1.5 for seconds in waits.values()), waits


async def test_a_wait_never_stands_in_the_way_of_the_call_that_ends_it(buffer: Buffer) -> None:
    """At the cap of parked calls, what frees them must still come through."""
    caller = buffer.caller()
    await caller.create(caps=pb.Caps(max_parked_waits=20))
    await caller.open()
    await caller.add("a")
    [claim] = await caller.claim()
    waits = [asyncio.create_task(caller.wait(1, max_wait=20)) for _ in range(19)]
    sample = asyncio.create_task(caller.sample(1, max_wait=20))
    await buffer.until_parked(20)
    await caller.finish_claim(claim)
    assert {told.outcome for told in await asyncio.gather(*waits)} == {"REACHED"}
    assert (await sample).ids == ["a"]
