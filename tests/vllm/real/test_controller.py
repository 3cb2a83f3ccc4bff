"""A controller over a real engine: requests that survive what happens to their replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest_asyncio

from services.engine.backends.base import Backend
from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import GuardedBackend
from services.runtime.clock import MonotonicClock
from tests.engine import helpers
from tests.vllm.real.engines import PROMPT, Engine, weights_file
from turnout.engine.v1 import engine_pb2 as pb

TOKENS = 300


class Lent(GuardedBackend):
    """A backend that leaves its engine alive, which others use after it."""

    async def close(self) -> None:
        self._line.drop()


@pytest_asyncio.fixture(loop_scope="session")
async def controller(engine: Engine) -> AsyncIterator[helpers.Engine]:
    """A controller whose one replica is the shared engine."""

    async def open_backend(spec: ReplicaSpec) -> Backend:
        return Lent(spec, engine.surface, MonotonicClock())

    async with helpers.running(open_backend=open_backend) as running:
        yield running


async def generate(controller: helpers.Engine, request_id: str) -> helpers.Output:
    sampling = pb.Sampling(temperature=0.0, logprobs=True)
    return await helpers.generate(controller, request_id, PROMPT, max_tokens=TOKENS, sampling=sampling, delta_tokens=1)


async def decoding(controller: helpers.Engine) -> None:
    """Wait until a few tokens of a request have come."""
    backend = controller.controller.fleet.get("r").backend

    async def begun() -> bool:
        return max((await backend.progress()).output_tokens.values(), default=0) >= 5

    await helpers.until(begun, 120)


async def update(controller: helpers.Engine, models: Path, version: int, kind: str, **fields: Any) -> None:
    """A weight transaction that moves the new weights as bytes through the controller."""
    data = weights_file(models).read_bytes()
    begun = await controller.stub.BeginWeightUpdate(
        pb.BeginWeightUpdateRequest(
            run_id=helpers.RUN, weight_version=version, kind=pb.UpdateKind.Value(f"UPDATE_KIND_{kind}"), **fields
        )
    )
    await helpers.move_weights(controller, begun.update_id, data, chunk=65536)
    if kind == "ASLEEP":
        await helpers.vacate(controller, begun)
    acks = [pb.UpdateAck(replica_id="r", ok=True, checksum=f"{google_crc32c.value(data):08x}")]
    await controller.stub.CommitWeightUpdate(
        pb.CommitWeightUpdateRequest(run_id=helpers.RUN, update_id=begun.update_id, acks=acks)
    )


async def test_a_request_goes_on_after_a_weight_update(controller: helpers.Engine, models: Path) -> None:
    """ABORT: its tokens so far are the old model's, the rest is continued under the new version; none is lost."""
    await helpers.register(controller, "r", "standalone", backend="vllm-inproc")
    old = (await generate(controller, "uncut")).tokens
    running = asyncio.create_task(generate(controller, "a"))
    await decoding(controller)
    await update(controller, models, 1, "AWAKE")
    output = await running
    assert (len(output.tokens), output.finish) == (TOKENS, "LENGTH")
    assert [segment.weight_version for segment in output.segments] == [0, 1]
    first = output.segments[0].tokens
    assert 0 < first < TOKENS
    assert output.tokens[:first] == old[:first]
    assert output.segments[0].continued


async def test_a_kept_request_goes_on_under_the_new_weights(controller: helpers.Engine, models: Path) -> None:
    """KEEP_RECOMPUTE: the request never leaves the engine; its segments tell the versions."""
    await helpers.register(controller, "r", "standalone", backend="vllm-inproc")
    running = asyncio.create_task(generate(controller, "a"))
    await decoding(controller)
    await update(controller, models, 1, "AWAKE", in_flight=pb.IN_FLIGHT_KEEP_RECOMPUTE)
    output = await running
    assert (len(output.tokens), output.finish) == (TOKENS, "LENGTH")
    assert [segment.weight_version for segment in output.segments] == [0, 1]


async def test_h44_a_lent_engine_is_taken_back_and_lent_again(controller: helpers.Engine, models: Path) -> None:
    """Requests wait through the reclaim and go on where they were: nothing is lost and nothing comes twice."""
    await helpers.register(controller, "r", "hybrid", backend="vllm-inproc")
    taken = await helpers.reclaim(controller)
    assert helpers.kinds(taken.operation) == {"r": "DONE"}
    replica = (await helpers.replicas(controller))["r"]
    assert replica.confirmed_free
    assert replica.weights == pb.WEIGHTS_STATE_DISCARDED
    asleep = replica.memory_bytes
    await lend(controller, models, "lend-1", 1)
    running = asyncio.create_task(generate(controller, "a"))
    await decoding(controller)
    await helpers.reclaim(controller)
    free = (await helpers.replicas(controller))["r"]
    assert free.confirmed_free
    assert abs(free.memory_bytes - asleep) < 64 << 20
    assert not running.done()
    await lend(controller, models, "lend-2", 1)
    output = await running
    uncut = await generate(controller, "b")
    assert (len(output.tokens), output.finish) == (TOKENS, "LENGTH")
    first, second = output.segments
    assert (first.weight_version, second.weight_version) == (1, 1)
    assert first.tokens + second.tokens == TOKENS
    assert output.tokens[: first.tokens] == uncut.tokens[: first.tokens]


async def test_h40_a_request_whose_replica_is_removed_goes_on_at_the_next(
    controller: helpers.Engine, engine: Engine
) -> None:
    """Its completion there counts for nothing: the engine is empty, and what had come is kept and continued."""
    await helpers.register(controller, "r", "standalone", backend="vllm-inproc")
    whole = (await generate(controller, "uncut")).tokens
    running = asyncio.create_task(generate(controller, "a"))
    await decoding(controller)
    await controller.stub.Deregister(pb.DeregisterRequest(run_id=helpers.RUN, replica_id="r"))
    await helpers.until(lambda: engine.surface.engine.get_num_unfinished_requests() == 0)
    assert not running.done()
    await helpers.register(controller, "r2", "standalone", backend="vllm-inproc")
    output = await running
    assert (len(output.tokens), output.finish) == (TOKENS, "LENGTH")
    assert [segment.replica_id for segment in output.segments] == ["r", "r2"]
    kept = output.segments[0].tokens
    assert output.tokens[:kept] == whole[:kept]
    assert controller.controller.fleet.placement.load("r2") == 0


async def lend(controller: helpers.Engine, models: Path, lend_id: str, version: int) -> None:
    """Lend the engine, with the new weights under a version."""
    await controller.stub.BeginLend(pb.BeginLendRequest(run_id=helpers.RUN, lend_id=lend_id))
    await update(controller, models, version, "ASLEEP")
    await controller.stub.FinishLend(pb.FinishLendRequest(run_id=helpers.RUN, lend_id=lend_id, weight_version=version))
