"""Figures of single calls: depth, wake-ups, finishing, sampling.

Invariants: both sides take turns in short slots, so that a slow moment of the machine hits both; a latency is a median,
a rate the median over slots; what is not asked about (adding prompts, giving a batch back) is not on the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import Final

import grpc.aio

from services.bench import buffer_messages as messages
from services.bench.buffer_world import Down, Side, Unary, World, connect
from services.bench.result import Result
from turnout.buffer.v1 import buffer_pb2 as pb

CONNECTIONS: Final = 8
"""Shared by the parked waiters: as many as a trainer with eight ranks has."""

CALLERS: Final = 64
"""Concurrent callers of finish_unary."""

STREAM_BATCH: Final = 64
"""Groups in one batch of a FinishStream."""

STREAM_WINDOW: Final = 4
"""Batches sent ahead of their answers: the producer does not wait for each round trip."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rounds: int
    """Slots of each side."""
    calls: int
    """Single calls in a slot."""
    wakes: int
    """Wake-ups of one waiter; a twentieth of it for many."""
    batches: int
    """Batches of a FinishStream in a slot, and calls of each caller of finish_unary."""
    groups: int
    """Groups of the large runs."""
    payload_bytes: int
    """Size of the payload that is moved."""


THOROUGH: Final = Effort(rounds=5, calls=300, wakes=100, batches=15, groups=100_000, payload_bytes=64 << 20)
QUICK: Final = Effort(rounds=1, calls=10, wakes=3, batches=2, groups=200, payload_bytes=2 << 20)
"""Shows that everything runs; its values mean nothing."""


async def latencies(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Seconds that each of `count` calls took, one after the other."""
    taken: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - begin)
    return taken


async def drain(call: AsyncIterable[bytes]) -> list[bytes]:
    """All answers of a stream."""
    return [answer async for answer in call]


async def fill(world: World, run_id: str, ids: Sequence[str], *, group: int = messages.GROUP, payload: int = 0) -> None:
    """Add groups and finish them."""
    step = max(1, 2000 // group)
    call = world.ours.unary("FinishTrajectories")
    for first in range(0, len(ids), step):
        some = ids[first : first + step]
        await world.stub.AddGroups(messages.add(run_id, some))
        answer = await call(messages.finish(run_id, some, group=group, payload=payload))
        check_outcomes(pb.FinishTrajectoriesResponse.FromString(answer).outcomes)


def check_outcomes(outcomes: Sequence[pb.ItemOutcome]) -> None:
    """Raise if something was refused: a refusal is quick, and must not pass for a good figure."""
    for outcome in outcomes:
        if outcome.code:
            raise RuntimeError(f"{outcome.reason}: {outcome.message}")


# -------------------------------------------------------------------------------------------------------------- depth


async def depth_query(world: World, effort: Effort) -> Result:
    """Milliseconds of GetSampleableCount over 64 groups."""
    run_id = "depth"
    await world.create(messages.create_run(run_id))
    await fill(world, run_id, messages.names("g", 64))
    request = messages.depth(run_id)
    ours, bare = world.ours.unary("GetSampleableCount"), world.bare.unary("Unary")
    answer = await ours(request)
    await world.answers([answer])
    if pb.GetSampleableCountResponse.FromString(answer).depth.sampleable != 64:
        raise RuntimeError("the depth is wrong")
    mine, theirs = await _take_turns(ours, bare, request, effort)
    await world.drop(run_id)
    return Result("depth_query", "ms", 1e3 * mine, 1e3 * theirs)


async def _take_turns(ours: Unary, bare: Unary, request: bytes, effort: Effort) -> tuple[float, float]:
    mine: list[float] = []
    theirs: list[float] = []
    for _ in range(effort.rounds):
        mine += await latencies(lambda: ours(request), effort.calls)
        theirs += await latencies(lambda: bare(request), effort.calls)
    return median(mine), median(theirs)


# -------------------------------------------------------------------------------------------------------------- waking


async def wake(world: World, effort: Effort, name: str, waiters: int) -> Result:
    """Milliseconds from the start of the finishing call to the return of the last of `waiters`."""
    run_id = f"wake-{waiters}"
    count = effort.wakes if waiters == 1 else max(2, effort.wakes // 20)
    await world.create(messages.create_run(run_id, group=1))
    ids = messages.names("g", count + 1)
    await world.stub.AddGroups(messages.add(run_id, ids))
    await _teach_wait(world, run_id)
    mine: list[float] = []
    theirs: list[float] = []
    async with AsyncExitStack() as stack:
        to_ours = await _connections(stack, world.ours, "WaitForSampleable", waiters)
        to_bare = await _connections(stack, world.bare, "Wait", waiters)
        finish, set_ = world.ours.unary("FinishTrajectories"), world.bare.unary("Set")
        for number in range(count):
            request = messages.wait(run_id, number + 1)
            finishing = messages.finish(run_id, [ids[number]], group=1)
            mine.append(await _wake_once(to_ours, request, lambda asked=finishing: finish(asked)))  # type: ignore[misc]
            theirs.append(await _wake_once(to_bare, request, lambda asked=finishing: set_(asked)))  # type: ignore[misc]
    await world.drop(run_id)
    return Result(name, "ms", 1e3 * median(mine), 1e3 * median(theirs))


async def _teach_wait(world: World, run_id: str) -> None:
    """Let the bare server answer with what a wait answers."""
    request = messages.wait(run_id, 0)
    await world.answers(await drain(world.ours.down("WaitForSampleable")(request)))


async def _connections(stack: AsyncExitStack, side: Side, name: str, waiters: int) -> list[Down]:
    """One call object for each waiter, over a few connections."""
    channels: list[grpc.aio.Channel] = [
        await stack.enter_async_context(connect(side.child.target)) for _ in range(min(CONNECTIONS, waiters))
    ]
    return [channels[number % len(channels)].unary_stream(side.prefix + name) for number in range(waiters)]


async def _wake_once(calls: list[Down], request: bytes, finish: Callable[[], Awaitable[bytes]]) -> float:
    parked = asyncio.Semaphore(0)

    async def waiter(call: Down) -> float:
        stream = aiter(call(request))
        await anext(stream)
        parked.release()
        async for _ in stream:
            pass
        return time.perf_counter()

    tasks = [asyncio.create_task(waiter(call)) for call in calls]
    for _ in tasks:
        await parked.acquire()
    begin = time.perf_counter()
    await finish()
    return max(await asyncio.gather(*tasks)) - begin


# --------------------------------------------------------------------------------------------------------- finishing


async def finish_unary(world: World, effort: Effort) -> Result:
    """Calls of FinishTrajectories per second, one group of 8 a call, from 64 callers at once."""
    run_id = "finish-unary"
    await world.create(messages.create_run(run_id))
    ours, bare = world.ours.unary("FinishTrajectories"), world.bare.unary("Unary")
    per_round = CALLERS * effort.batches
    mine: list[float] = []
    theirs: list[float] = []
    for number in range(effort.rounds):
        ids = messages.names("g", per_round, number * per_round)
        await world.stub.AddGroups(messages.add(run_id, ids))
        requests = [messages.finish(run_id, [group_id]) for group_id in ids]
        seconds, answers = await _call_all(ours, requests)
        for answer in answers:
            check_outcomes(pb.FinishTrajectoriesResponse.FromString(answer).outcomes)
        mine.append(per_round / seconds)
        await world.answers(answers[:1])
        seconds, _ = await _call_all(bare, requests)
        theirs.append(per_round / seconds)
    await world.drop(run_id)
    return Result("finish_unary", "1/s", median(mine), median(theirs))


async def _call_all(call: Unary, requests: list[bytes]) -> tuple[float, list[bytes]]:
    left = iter(requests)
    answers: list[bytes] = []

    async def caller() -> None:
        for request in left:
            answer = await call(request)
            answers.append(answer)

    begin = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return time.perf_counter() - begin, answers


async def finish_stream(world: World, effort: Effort) -> Result:
    """Groups of 8 per second that one producer finishes by FinishStream, in batches of 64 groups."""
    run_id = "finish-stream"
    await world.create(messages.create_run(run_id))
    per_round = STREAM_BATCH * effort.batches
    mine: list[float] = []
    theirs: list[float] = []
    for number in range(effort.rounds):
        ids = messages.names("g", per_round, number * per_round)
        await world.stub.AddGroups(messages.add(run_id, ids))
        batches = (
            messages.finish_batch(first, ids[first : first + STREAM_BATCH])
            for first in range(0, per_round, STREAM_BATCH)
        )
        frames = [messages.finish_header(run_id), *batches]
        seconds, answers = await _stream(world.ours, "FinishStream", frames, skip=1)
        for answer in answers:
            check_outcomes(pb.FinishStreamResponse.FromString(answer).outcomes)
        mine.append(per_round / seconds)
        await world.answers(answers[:1])
        seconds, _ = await _stream(world.bare, "Stream", frames[1:], skip=0)
        theirs.append(per_round / seconds)
    await world.drop(run_id)
    return Result("finish_stream", "groups/s", median(mine), median(theirs))


async def _stream(side: Side, name: str, frames: list[bytes], *, skip: int) -> tuple[float, list[bytes]]:
    """Send frames, of which the first `skip` are not answered; returns the seconds and the answers."""
    window = asyncio.Semaphore(STREAM_WINDOW)
    answers: list[bytes] = []

    async def send() -> AsyncIterator[bytes]:
        for position, frame in enumerate(frames):
            if position >= skip:
                await window.acquire()
            yield frame

    begin = time.perf_counter()
    async for answer in side.both(name)(send()):
        answers.append(answer)
        window.release()
    return time.perf_counter() - begin, answers


# ------------------------------------------------------------------------------------------------------------- sampling


async def sample_64(world: World, effort: Effort, run_id: str) -> Result:
    """Milliseconds of Sample(64) from a run that is full, until the last message is there."""
    call, bare = world.ours.down("Sample"), world.bare.down("Many")
    request = messages.sample(run_id, 64)
    mine: list[float] = []
    theirs: list[float] = []
    for _ in range(max(2, effort.calls // 6)):
        begin = time.perf_counter()
        answers = await drain(call(request))
        mine.append(time.perf_counter() - begin)
        done = pb.SampleResponse.FromString(answers[-1]).done
        if done.group_count != 64:
            raise RuntimeError(f"sampled {done.group_count} groups: {done.reason}")
        await world.stub.ReleaseSample(pb.ReleaseSampleRequest(run_id=run_id, lease_id=done.lease_id))
        await world.answers(answers)
        begin = time.perf_counter()
        await drain(bare(b""))
        theirs.append(time.perf_counter() - begin)
    return Result("sample_64", "ms", 1e3 * median(mine), 1e3 * median(theirs))
