"""What the services cost while everybody waits.

Invariants: the services run as the processes they are in production, each waiter has a connection of its own, and the
measurement begins when all of them are parked; the baseline is a bare gRPC server with the same number of parked calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

import grpc.aio

from services.bench.bare import METHOD
from services.bench.cpu import processor_seconds
from services.bench.result import Result
from services.processes.child import Child, ChildSpec
from services.processes.fleet import Fleet
from services.processes.service import service_spec
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, AsyncEngineClient, duration
from turnout.engine.v1 import engine_pb2

RUN: Final = "bench-idle"
LONG_S: Final = 3600.0
"""Longer than any bench."""

_SETTLE_S: Final = 2.0
"""After the last call is parked, for connections and their first pings."""

_SERVICES: Final = ("buffer", "engine", "scheduler")


async def idle_share(seconds: float, waiters: int) -> Result:
    """Return the share of one core that the three services use together with `waiters` parked calls, in per cent."""
    async with Fleet() as fleet:
        specs = [service_spec(name, "--listen", "127.0.0.1:0", "--log-level", "warning") for name in _SERVICES]
        children = await fleet.start_all(*specs)
        buffer, engine, _ = children
        async with AsyncExitStack() as stack:
            parked = await _park_at_services(stack, buffer.target, engine.target, waiters)
            value = await fleet.run(_measure(children, seconds, parked))
        bare = await fleet.start(ChildSpec("bare", "services.bench.bare"))
        async with AsyncExitStack() as stack:
            parked = [await _park_at_bare(stack, bare.target) for _ in range(waiters)]
            baseline = await fleet.run(_measure([bare], seconds, parked))
    return Result(f"idle_cpu_{waiters}_waiters", "% of one core", value, baseline)


async def _park_at_services(
    stack: AsyncExitStack, buffer: str, engine: str, waiters: int
) -> list[asyncio.Task[object]]:
    setup = await stack.enter_async_context(AsyncBufferClient(buffer))
    await setup.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id=RUN))
    opener = await stack.enter_async_context(AsyncEngineClient(engine))
    await opener.calls.OpenEpoch(engine_pb2.OpenEpochRequest(run_id=RUN))
    kinds: list[Callable[[AsyncExitStack, str, str], Awaitable[asyncio.Task[object]]]] = [
        _wait_for_groups,
        _wait_for_work,
        _watch_replicas,
    ]
    return [await kinds[number % len(kinds)](stack, buffer, engine) for number in range(waiters)]


async def _wait_for_groups(stack: AsyncExitStack, buffer: str, engine: str) -> asyncio.Task[object]:
    client = await stack.enter_async_context(AsyncBufferClient(buffer))
    request = buffer_pb2.WaitForSampleableRequest(
        run_id=RUN, partition="train", step=1, target=1, max_wait=duration(LONG_S)
    )
    return _background(stack, client.wait_for_sampleable(request))


async def _wait_for_work(stack: AsyncExitStack, buffer: str, engine: str) -> asyncio.Task[object]:
    client = await stack.enter_async_context(AsyncBufferClient(buffer))
    request = buffer_pb2.ClaimGroupsRequest(run_id=RUN, partition="train", worker_id="bench", max_wait=duration(LONG_S))
    return _background(stack, client.calls.ClaimGroups(request, timeout=2 * LONG_S))


async def _watch_replicas(stack: AsyncExitStack, buffer: str, engine: str) -> asyncio.Task[object]:
    client = await stack.enter_async_context(AsyncEngineClient(engine))

    async def watch() -> None:
        async for _ in client.watch_replicas(engine_pb2.WatchReplicasRequest(run_id=RUN)):
            pass

    return _background(stack, watch())


async def _park_at_bare(stack: AsyncExitStack, target: str) -> asyncio.Task[object]:
    # As a client of ours does: a connection of its own, pinged every few seconds.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", 4000)]
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(target, options=options))
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
    return _background(stack, call(b""))


def _background(stack: AsyncExitStack, work: Awaitable[object]) -> asyncio.Task[object]:
    async def run() -> object:
        return await work

    task = asyncio.create_task(run())

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
    return task


async def _measure(children: list[Child], seconds: float, parked: list[asyncio.Task[object]]) -> float:
    await asyncio.sleep(_SETTLE_S)
    pids = [child.process.pid for child in children]
    before = processor_seconds(pids)
    await asyncio.sleep(seconds)
    used = processor_seconds(pids) - before
    for task in parked:
        if task.done():
            # A call that came back was not parked; its error, if it has one, says why.
            raise RuntimeError(f"a waiter did not stay parked: {task.exception() or task.result()!r}")
    return 100 * used / seconds
