"""Who asks for the depth, from a process of its own, at a fixed rate.

    python -P -m services.bench.load_probe ERRAND

Invariants: a query is sent when it is due, whether those before it were answered or not, and its time is counted from
then, so that a server that stops for a second shows in all the queries of that second; between two queries the bare
server gets a call of the same size, sent the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from services.bench.bare_buffer import SERVICE
from services.bench.load_plan import Errand
from services.bench.load_process import Errors, run_errand
from services.bench.load_trainers import PARTITION
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient

Call = Callable[[int], Awaitable[object]]


async def ask_open_loop(calls: list[Call], interval: float, stop: asyncio.Event, errors: Errors) -> list[list[float]]:
    """Make all calls in turn, each every `interval` seconds, until stopped. Seconds from when each was due, per call.

    What a call raises is an error, and has no time.
    """
    taken: list[list[float]] = [[] for _ in calls]
    at_work: set[asyncio.Task[None]] = set()

    async def ask(which: int, number: int, due: float) -> None:
        try:
            await calls[which](number)
        except Exception as error:
            errors.add(f"query {number}: {error!r}")
        else:
            taken[which].append(time.perf_counter() - due)

    began = time.perf_counter()
    number = 0
    while True:
        due = began + number * interval / len(calls)
        if (pause := due - time.perf_counter()) > 0:
            await asyncio.sleep(pause)
        if stop.is_set():
            break
        task = asyncio.create_task(ask(number % len(calls), number // len(calls), due))
        at_work.add(task)
        task.add_done_callback(at_work.discard)
        number += 1
    await asyncio.gather(*at_work)
    return taken


async def work(errand: Errand, stop: asyncio.Event, errors: Errors) -> dict[str, Any]:
    """Ask until stopped."""
    access, runs = errand.access, errand.runs
    requests = [buffer_pb2.GetSampleableCountRequest(run_id=run, partition=PARTITION) for run in runs]
    message = requests[0].SerializeToString()
    least = [10**9]
    async with (
        AsyncBufferClient(access.buffer, access.options("reader")) as client,
        grpc.aio.insecure_channel(access.bare) as channel,
    ):
        bare: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"{SERVICE}Unary")
        seen: dict[int, int] = {}

        async def depth(number: int) -> None:
            which = number % len(runs)
            counts = (await client.calls.GetSampleableCount(requests[which])).depth.counts
            seen[which] = counts.pending + counts.running + counts.finished + counts.failed + counts.sampled
            if len(seen) == len(runs):
                least[0] = min(least[0], sum(seen.values()))

        async def echo(number: int) -> None:
            await bare(message)

        # Connecting is not on the clock.
        for number in range(len(runs)):
            await depth(number)
        answer = await client.calls.GetSampleableCount(requests[0])
        answers: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"{SERVICE}Answers")
        await answers(iter([answer.SerializeToString()]))
        await echo(0)
        ours, theirs = await ask_open_loop([depth, echo], 1 / errand.plan.queries, stop, errors)
    return {"ours": [round(each, 6) for each in ours], "bare": [round(each, 6) for each in theirs], "least": least[0]}


if __name__ == "__main__":
    run_errand(work)
