"""The cycle of a run, end to end over a real socket: update, lend, generate, reclaim."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.engine.helpers import (
    RUN,
    generate,
    kinds,
    lend,
    reclaim,
    register,
    replicas,
    role,
    running,
    until,
    update,
)
from tests.engine.recorder import in_engines
from turnout.engine.v1 import engine_pb2 as pb


@pytest.mark.parametrize("behind_agent", [False, True])
async def test_a_lend_serves_and_a_reclaim_frees_every_gpu(behind_agent: bool) -> None:
    """A lend that leaves memory asleep, or a reclaim that leaves it filled, breaks training or generation."""
    own = ["h0:hybrid", "h1:hybrid", "s0:standalone"]
    async with running(agent=True, replica=own, time_scale=0.01) as agent, running(time_scale=0.01) as engine:
        where = {"backend": "agent", "endpoint": agent.host.target} if behind_agent else {}
        await register(engine, "h0", weights=pb.WEIGHTS_ORIGIN_NONE, **where)
        await register(engine, "h1", weights=pb.WEIGHTS_ORIGIN_NONE, **where)
        await register(engine, "s0", "standalone", **where)
        assert (await replicas(engine))["h0"].route == pb.ROUTE_STATE_OUT
        await update(engine, role("standalone"), 1)
        assert kinds((await lend(engine, "lend-1", 1)).operation) == {"h0": "DONE", "h1": "DONE"}
        now = await replicas(engine)
        assert {r.route for r in now.values()} == {pb.ROUTE_STATE_SERVING}
        assert {r.weight_version for r in now.values()} == {1}
        assert not any(r.reason for r in now.values())
        outputs = await asyncio.gather(*(generate(engine, f"r{i}", (i, 1), max_tokens=500) for i in range(12)))
        assert {len(output.tokens) for output in outputs} == {500}
        assert {output.placed[0] for output in outputs} == {"h0", "h1", "s0"}
        assert {s.weight_version for output in outputs for s in output.segments} == {1}
        answer = await reclaim(engine)
        assert kinds(answer.operation) == {"h0": "DONE", "h1": "DONE"}
        now = await replicas(engine)
        assert now["h0"].confirmed_free
        assert not now["h0"].resident_tags
        assert now["h0"].sleep_level == pb.SLEEP_LEVEL_TWO
        assert now["h0"].memory_bytes == 0
        assert not now["s0"].confirmed_free


@pytest.mark.parametrize("behind_agent", [False, True])
async def test_interrupted_output_equals_an_uninterrupted_one(behind_agent: bool) -> None:
    """Moving a request must neither lose nor repeat tokens."""
    own = ["h0:hybrid", "s0:standalone"]
    async with running(agent=True, replica=own, time_scale=0.02) as agent, running(time_scale=0.02) as engine:
        where = {"backend": "agent", "endpoint": agent.host.target} if behind_agent else {}
        await register(engine, "h0", weights=pb.WEIGHTS_ORIGIN_NONE, **where)
        await register(engine, "s0", "standalone", **where)
        await lend(engine, "lend-1", 0)
        whole = await generate(engine, "whole", max_tokens=9000, sampling=pb.Sampling(seed=5))
        first = asyncio.create_task(generate(engine, "a", max_tokens=9000, sampling=pb.Sampling(seed=5)))
        second = asyncio.create_task(generate(engine, "b", max_tokens=9000, sampling=pb.Sampling(seed=5)))
        await until(lambda: in_engines(engine) == 2)
        await asyncio.sleep(0.1)
        assert (await reclaim(engine)).interrupted == 1
        outputs = await asyncio.gather(first, second)
        assert [output.tokens for output in outputs] == [whole.tokens] * 2
        moved = next(output for output in outputs if len(output.segments) > 1)
        assert [(s.replica_id, s.continued) for s in moved.segments] == [("h0", True), ("s0", False)]
        assert sum(s.tokens for s in moved.segments) == len(whole.tokens)


async def test_another_run_is_not_served() -> None:
    """Two runs that share a controller by mistake would move each other's GPUs."""
    async with running() as engine:
        await register(engine, "s0", "standalone")
        with pytest.raises(Exception, match="does not serve"):
            await engine.stub.ListReplicas(pb.ListReplicasRequest(run_id=RUN + "x"))


@pytest.mark.parametrize("behind_agent", [False, True])
async def test_nine_of_ten_tokens_of_lent_replicas_are_kept_by_their_requests(behind_agent: bool) -> None:
    """A lend whose tokens are thrown away at the reclaim costs switches and brings nothing."""
    own = ["h0:hybrid", "h1:hybrid", "s0:standalone"]
    async with running(agent=True, replica=own, time_scale=0.01) as agent, running(time_scale=0.01) as engine:
        where = {"backend": "agent", "endpoint": agent.host.target} if behind_agent else {}
        for replica_id in ("h0", "h1"):
            await register(engine, replica_id, weights=pb.WEIGHTS_ORIGIN_NONE, **where)
        await register(engine, "s0", "standalone", **where)
        await lend(engine, "lend-1", 0)
        tasks = [asyncio.create_task(generate(engine, f"r{i}", max_tokens=3000)) for i in range(12)]
        await until(lambda: in_engines(engine) == 12)
        await asyncio.sleep(0.1)
        assert (await reclaim(engine)).interrupted == 8
        outputs = await asyncio.gather(*tasks)
        report = (await engine.stub.GetProgress(pb.GetProgressRequest(run_id=RUN))).report
        of_segments: Counter[str] = Counter()
        for output in outputs:
            assert len(output.tokens) == 3000
            for segment in output.segments:
                of_segments[segment.replica_id] += segment.tokens
        for counters in report.replicas:
            assert counters.delivered_tokens == of_segments[counters.replica_id]
            assert counters.decoded_tokens > 0
            assert counters.delivered_tokens >= 0.9 * counters.decoded_tokens


@pytest.mark.parametrize(("hybrids", "standalones"), [(4, 2), (2, 2), (1, 3)])
async def test_interrupted_requests_land_on_lent_replicas_as_often_as_the_least_loaded_would_have(
    hybrids: int, standalones: int
) -> None:
    """Sessions that stick to standalone replicas would leave the lent ones idle, whatever was paid for them."""
    async with running(time_scale=0.05) as engine:
        for number in range(hybrids):
            await register(engine, f"h{number}", weights=pb.WEIGHTS_ORIGIN_NONE)
        for number in range(standalones):
            await register(engine, f"s{number}", "standalone")
        count = 48
        tasks = [
            asyncio.create_task(generate(engine, f"r{i}", max_tokens=3000, session_id=f"g{i // 4}"))
            for i in range(count)
        ]
        await until(lambda: in_engines(engine) == count)
        # As a trainer's step ends: the lend begins, and the update interrupts what runs on the standalone replicas.
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        await update(engine, role("standalone"), 1)
        await update(engine, role("hybrid"), 1, "ASLEEP")
        await engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=1))
        await until(lambda: in_engines(engine) == count)
        now = await replicas(engine)
        lent = sum(replica.running for name, replica in now.items() if name.startswith("h"))
        assert abs(lent / count - hybrids / (hybrids + standalones)) <= 0.05
        await asyncio.gather(*tasks)
