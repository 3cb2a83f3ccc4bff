"""kill -9 of a controller in the middle of a round, its agents alive."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.engine.helpers import RUN, Engine, generate, generate_request, register, replicas
from tests.engine.rounds import HYBRID, STANDALONE, Trainer
from tests.engine.test_agent_process import AgentProcess, agent
from turnout.client import AsyncEngineClient
from turnout.engine.v1 import engine_pb2 as pb
from turnout.engine.v1 import engine_pb2_grpc

TOKENS = 4000
TURNOUT = Path(sys.executable).with_name("turnout")


class ControllerProcess(Engine):
    """A process of `turnout engine serve`, seen through its stub alone."""

    def __init__(
        self, process: asyncio.subprocess.Process, stub: engine_pb2_grpc.EngineControllerAsyncStub, target: str
    ) -> None:
        self.process = process
        self.stub = stub
        self.target = target


@asynccontextmanager
async def controller(directory: Path, *flags: str, listen: str = "127.0.0.1:0") -> AsyncIterator[ControllerProcess]:
    """A controller on this data directory; it is gone afterwards."""
    arguments = ["engine", "serve", "--listen", listen, "--data-dir", str(directory), "--time-scale", "0.05"]
    process = await asyncio.create_subprocess_exec(
        TURNOUT, *arguments, "--log-level", "error", *flags, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            target = (await process.stdout.readline()).decode().strip().rpartition(" ")[2]
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            yield ControllerProcess(process, engine_pb2_grpc.EngineControllerStub(channel), target)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def at_agent(node: AgentProcess) -> pb.ListReplicasResponse:
    """What an agent says of its engines."""
    async with grpc.aio.insecure_channel(node.target) as channel:
        stub: Any = engine_pb2_grpc.EngineControllerStub(channel)
        answer: pb.ListReplicasResponse = await stub.ListReplicas(pb.ListReplicasRequest(run_id=RUN))
        return answer


async def check(engine: Engine, node: AgentProcess, incarnation: str) -> None:
    """Nothing serves whose engine could not, nothing is called free that holds memory, and no engine was lost."""
    told = await replicas(engine)
    real = await at_agent(node)
    assert real.incarnation == incarnation
    for replica in real.replicas:
        assert replica.health == pb.REPLICA_HEALTH_HEALTHY, "an engine died of what it was told"
        known = told.get(replica.spec.replica_id)
        if known is not None and known.route == pb.ROUTE_STATE_SERVING:
            assert list(replica.resident_tags) == list(replica.declared_tags)
            assert (replica.weights, replica.paused) == (pb.WEIGHTS_STATE_INTACT, False)
            assert replica.weight_version == known.weight_version
        if known is not None and known.confirmed_free:
            assert not replica.resident_tags


async def until_killed(trainer: Trainer, engine: ControllerProcess, after_s: float) -> None:
    """Go on with the round until the controller is killed, or the round is over."""
    going = asyncio.ensure_future(trainer.go())
    await asyncio.wait({going}, timeout=after_s)
    engine.process.kill()
    await engine.process.wait()
    await asyncio.wait({going})
    if not going.cancelled() and (error := going.exception()) is not None:
        assert isinstance(error, grpc.aio.AioRpcError), error
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("durability", "seed", "deaths"),
    [
        ("os", 7, 1),
        *(pytest.param(level, seed, 6, marks=pytest.mark.slow) for level in ("os", "fsync") for seed in range(3)),
    ],
)
async def test_h44_a_killed_controller_goes_on_where_it_was(
    tmp_path: Path, durability: str, seed: int, deaths: int
) -> None:
    """Agents keep their engines, the trainer repeats its call, and nothing serves or is called free that must not."""
    rng = random.Random(seed)
    flags = ("--durability", durability)
    # A transition takes a tenth of a second, so that a kill meets one.
    slow = ("--sleep-seconds", "2", "--wake-seconds", "2", "--load-seconds", "2")
    async with agent(*(f"{h}:hybrid" for h in HYBRID), *(f"{s}:standalone" for s in STANDALONE), more=slow) as node:
        incarnation = ""
        trainer: Trainer | None = None
        for _ in range(deaths):
            async with controller(tmp_path, *flags) as engine:
                if trainer is None:
                    trainer = Trainer(engine, lambda _: {"backend": "agent", "endpoint": node.target})
                else:
                    trainer.engine = engine
                    if trainer.at:
                        incarnation = incarnation or (await at_agent(node)).incarnation
                        await check(engine, node, incarnation)
                await until_killed(trainer, engine, rng.uniform(0.05, 0.5))
        assert trainer is not None
        incarnation = incarnation or (await at_agent(node)).incarnation
        async with controller(tmp_path, *flags) as engine:
            trainer.engine = engine
            await trainer.go()
            await check(engine, node, incarnation)
            now = await replicas(engine)
            assert all(now[hybrid].confirmed_free for hybrid in HYBRID)
            assert {now[s].weight_version for s in STANDALONE} == {1}
            assert len((await generate(engine, "after", max_tokens=3)).tokens) == 3


async def test_h57_an_output_goes_on_where_the_dead_controller_left_it(tmp_path: Path) -> None:
    """The client keeps what it was given; the next controller decodes the rest under the same seed."""
    request = seeded("cut", delta_tokens=16)
    seen: list[int] = []
    half = asyncio.Event()

    def on_delta(delta: pb.Delta) -> None:
        seen.extend(delta.token_ids)
        if len(seen) > TOKENS // 4:
            half.set()

    async with agent("s0:standalone") as node, AsyncExitStack() as lives:
        first = await lives.enter_async_context(controller(tmp_path))
        await register(first, "s0", "standalone", backend="agent", endpoint=node.target)
        client = await lives.enter_async_context(AsyncEngineClient(first.target))
        going = asyncio.ensure_future(client.generate(request, on_delta=on_delta))
        async with asyncio.timeout(20):
            await half.wait()
        first.process.kill()
        await first.process.wait()
        before = len(seen)
        second = await lives.enter_async_context(controller(tmp_path, listen=first.target))
        made = await going
        progress = await second.stub.GetProgress(pb.GetProgressRequest(run_id=RUN))
        whole = await client.generate(seeded("whole", delta_tokens=0))
    assert before < TOKENS
    assert made.token_ids == whole.token_ids
    assert len(made.token_ids) == TOKENS
    assert made.token_ids[: len(seen)] == seen
    assert sum(segment.tokens for segment in made.segments) == TOKENS
    assert [segment.continued for segment in made.segments] == [True, False]
    # Twice, at most: what was on its way when the controller died, a quarter of a second of decoding.
    assert TOKENS <= progress.report.replicas[0].decoded_tokens < 2 * TOKENS - before


def seeded(request_id: str, **fields: Any) -> pb.GenerateRequest:
    """A request with a seed of its own."""
    request = generate_request(request_id, max_tokens=TOKENS, **fields)
    request.delta_interval.FromSeconds(0)
    request.sampling.seed = 11
    return request
