"""The processes of the engine bench, and raw calls on them.

Invariants: the controller runs as `serve` runs it, journal and metrics included; the engine is a node agent in a
process of its own, so that the same call on it is the engine's own time. A replica that is commanded behind the back of
the controller is a twin that the controller does not know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import grpc.aio

from services.processes.child import ChildSpec
from services.processes.fleet import Fleet
from services.processes.service import service_spec
from services.runtime.journal import Durability
from turnout.engine.v1 import engine_pb2 as pb
from turnout.engine.v1 import engine_pb2_grpc

RUN: Final = "bench-engine"
LONG: Final = 1 << 20
"""Tokens that no slot lasts for."""

Stub: TypeAlias = "engine_pb2_grpc.EngineControllerAsyncStub"


@dataclass(frozen=True, slots=True)
class Side:
    """The controller, or the agent itself."""

    stub: Stub
    pinned: bool
    """Whether requests name their replica, as an agent's must."""

    async def sleep(self, replica_id: str) -> None:
        """Put a replica to sleep, its weights kept."""
        await self.stub.Sleep(pb.SleepRequest(run_id=RUN, selector=only(replica_id), level=pb.SLEEP_LEVEL_ONE))

    async def wake_up(self, replica_id: str) -> None:
        """Wake it."""
        await self.stub.WakeUp(pb.WakeUpRequest(run_id=RUN, selector=only(replica_id)))

    async def pause(self, replica_id: str) -> None:
        """Pause it."""
        await self.stub.Pause(pb.PauseRequest(run_id=RUN, selector=only(replica_id)))

    async def resume(self, replica_id: str) -> None:
        """Resume it."""
        await self.stub.Resume(pb.ResumeRequest(run_id=RUN, selector=only(replica_id)))

    async def reset(self, replica_id: str) -> None:
        """Reset its caches."""
        await self.stub.ResetCaches(pb.ResetCachesRequest(run_id=RUN, selector=only(replica_id)))

    async def generate(self, replica_id: str, request_id: str, tokens: int) -> int:
        """Generate, with the usual deltas; returns how many tokens came."""
        request = pb.GenerateRequest(
            run_id=RUN,
            request_id=request_id,
            prompt_token_ids=[1, 2, sum(request_id.encode())],
            max_tokens=tokens,
            replica_id=replica_id if self.pinned else "",
        )
        came = 0
        async for event in self.stub.Generate(request):
            came += len(event.delta.token_ids) + len(event.done.rest.token_ids)
        return came

    async def running(self, replica_id: str) -> int:
        """Requests in the engine of a replica."""
        answer = await self.stub.ListReplicas(pb.ListReplicasRequest(run_id=RUN, selector=only(replica_id)))
        return answer.replicas[0].running

    @asynccontextmanager
    async def busy(self, replica_id: str, requests: int, count: int) -> AsyncIterator[None]:
        """Have `count` requests of `requests` that are made run on a replica."""
        name = f"busy-{time.monotonic_ns()}"
        tasks = [asyncio.create_task(self.generate(replica_id, f"{name}-{i}", LONG)) for i in range(requests)]
        try:
            while await self.running(replica_id) < count:  # noqa: ASYNC110 - counts are told to nobody
                await asyncio.sleep(0.01)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def only(*replica_ids: str) -> pb.ReplicaSelector:
    """These replicas."""
    return pb.ReplicaSelector(replica_ids=replica_ids)


async def timed(call: Awaitable[object]) -> float:
    """Wall seconds that a call takes."""
    begin = time.perf_counter()
    await call
    return time.perf_counter() - begin


def controller_spec(directory: Path, *flags: str) -> ChildSpec:
    """The controller as `serve` runs it."""
    return service_spec(
        "engine",
        *("--listen", "127.0.0.1:0"),
        *("--metrics-listen", "127.0.0.1:0"),
        *("--log-level", "error"),
        *("--data-dir", str(directory)),
        *("--durability", Durability.OS.value),
        *flags,
    )


def agent_spec(name: str, replicas: Sequence[str], *flags: str) -> ChildSpec:
    """A node agent with these replicas."""
    listen = ("--listen", "127.0.0.1:0", "--log-level", "error")
    own = (word for replica in replicas for word in ("--replica", replica))
    return service_spec("engine", "--agent", *listen, *own, *flags, name=name)


@asynccontextmanager
async def connected(target: str, *, pinned: bool) -> AsyncIterator[Side]:
    """A side, over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield Side(engine_pb2_grpc.EngineControllerStub(channel), pinned)


async def register(side: Side, replica_id: str, role: pb.ReplicaRole.ValueType, endpoint: str = "") -> None:
    """Register a replica, of an agent or within the controller. Its weights survive a sleep."""
    spec = pb.ReplicaSpec(
        replica_id=replica_id,
        role=role,
        backend="agent" if endpoint else "reference",
        endpoint=endpoint,
        gpus=[pb.Gpu(node="bench", uuid=replica_id)],
        flags=pb.ReplicaFlags(mtp_rollout=True),
    )
    await side.stub.Register(pb.RegisterRequest(run_id=RUN, spec=spec))


@dataclass(frozen=True, slots=True)
class World:
    """A controller over three agents: `quick` has c0 and takes no time, `slow` has h0, which takes some to go to sleep,
    `standalone` has s0, which serves. c1 and h1 are the twins."""

    ours: Side
    quick: Side
    slow: Side
    standalone: Side


@asynccontextmanager
async def world(directory: Path, sleep_s: float) -> AsyncIterator[World]:
    """The processes, with the journal in `directory`."""
    async with Fleet() as fleet:
        controller, quick, slow, standalone = await fleet.start_all(
            controller_spec(directory),
            agent_spec("quick", ("c0:hybrid", "c1:hybrid"), "--fault-injection"),
            agent_spec("slow", ("h0:hybrid", "h1:hybrid"), "--sleep-seconds", str(sleep_s)),
            agent_spec("standalone", ("s0:standalone",), "--fault-injection"),
        )
        async with (
            connected(controller.target, pinned=False) as ours,
            connected(quick.target, pinned=True) as to_quick,
            connected(slow.target, pinned=True) as to_slow,
            connected(standalone.target, pinned=True) as to_standalone,
        ):
            await register(ours, "c0", pb.REPLICA_ROLE_HYBRID, quick.target)
            await register(ours, "h0", pb.REPLICA_ROLE_HYBRID, slow.target)
            await register(ours, "s0", pb.REPLICA_ROLE_STANDALONE, standalone.target)
            yield World(ours, to_quick, to_slow, to_standalone)


@asynccontextmanager
async def many(directory: Path, count: int, sleep_s: float) -> AsyncIterator[Side]:
    """A controller with so many reference replicas, which sleep for a while."""
    async with Fleet() as fleet:
        # Little memory: copying it is the reference engine's own work, and all of it on this one processor.
        flags = (
            "--sleep-seconds",
            str(sleep_s),
            "--fault-injection",
            "--weights-bytes",
            "65536",
            "--kv-bytes",
            "65536",
        )
        child = await fleet.start(controller_spec(directory, *flags))
        async with connected(child.target, pinned=False) as side:
            for number in range(count):
                await register(side, replica_name(number), pb.REPLICA_ROLE_HYBRID)
            yield side


def replica_name(number: int) -> str:
    """Name of one of many."""
    return f"r{number:02}"
