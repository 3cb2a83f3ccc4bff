"""Case H44, as far as the engine controller has a part in it: the order of a reclaim, and work that it interrupts."""

from __future__ import annotations

import asyncio
from typing import Any

from services.engine.domain.requests import default_seed
from services.runtime.errors import internal
from tests.engine.helpers import RUN, generate, kinds, lend, partial, refused, replicas, until
from tests.engine.recorder import in_engines, recorded
from turnout.engine.v1 import engine_pb2 as pb


async def test_h44_a_reclaim_unroutes_then_drains_then_sleeps() -> None:
    """Freeing memory while a step was in flight hung the engine."""
    async with recorded("h0:hybrid", "s0:standalone", scale=1.0) as (engine, recorders):
        await lend(engine, "l", 0)
        tasks = [asyncio.create_task(generate(engine, f"r{i}", (i,), max_tokens=100_000)) for i in range(6)]
        await until(lambda: in_engines(engine) == 6)
        gate = asyncio.Event()
        recorders["h0"].faults["pause(abort)"] = [gate]
        recorders.forget()
        call = asyncio.ensure_future(engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN)))
        await until(lambda: recorders["h0"].calls == ["pause(abort)"])
        assert (await replicas(engine))["h0"].route == pb.ROUTE_STATE_OUT
        tasks.append(asyncio.create_task(generate(engine, "late", max_tokens=100_000)))
        await until(lambda: engine.controller.fleet.placement.load("s0") == 4)
        gate.set()
        answer = await call
        assert answer.interrupted == 3
        own = [name for name in recorders["h0"].calls if name != "abort"]
        assert own == ["pause(abort)", "sleep(2)", "reset(encoder)"]
        assert (await replicas(engine))["h0"].confirmed_free
        await until(lambda: len(engine.controller.fleet.get("s0").forwards) == 7)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_h44_interrupted_work_keeps_its_tokens() -> None:
    """Aborted work on the way back was sometimes dropped: here 10, 200 and 0 tokens of output go on elsewhere."""
    async with recorded("h0:hybrid", "s0:standalone", scale=0.02) as (engine, _):
        await lend(engine, "l", 0)
        wanted = [(0, 10), (1, 200), (2, 0)]
        outputs = await asyncio.gather(*(generate(engine, f"w{i}", (i,), max_tokens=8000) for i, _ in wanted))
        whole = {i: output.tokens for (i, _), output in zip(wanted, outputs, strict=True)}
        tasks = []
        for i, so_far in wanted:
            fields: dict[str, Any] = {"output_token_ids": whole[i][:so_far]}
            if so_far:
                fields["output_segments"] = [pb.OutputSegment(tokens=so_far, weight_version=7, replica_id="old")]
            sampling = pb.Sampling(seed=default_seed(f"w{i}"))
            tasks.append(
                asyncio.create_task(generate(engine, f"r{i}", (i,), max_tokens=8000, sampling=sampling, **fields))
            )
        await until(lambda: in_engines(engine) == 3)
        await engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN))
        for (i, so_far), task in zip(wanted, tasks, strict=True):
            output = await task
            assert output.tokens == whole[i][so_far:]
            assert sum(segment.tokens for segment in output.segments) == len(whole[i])
            assert (output.segments[0].replica_id == "old") == (so_far > 0)


async def test_h44_a_failed_sleep_is_not_free_and_can_be_retried() -> None:
    """The trainer would run into memory that is still in use."""
    async with recorded("h0:hybrid", "h1:hybrid") as (engine, recorders):
        await lend(engine, "l", 0)
        recorders["h0"].faults["sleep(2)"] = [internal("ENGINE_FAILED", "no luck")]
        reclaim = pb.ReclaimRequest(run_id=RUN)
        outcomes = await partial(engine, engine.stub.Reclaim(reclaim), "FAILED_PRECONDITION")
        assert {key for key, outcome in outcomes.items() if outcome.code} == {"h0"}
        now = await replicas(engine)
        assert (now["h0"].confirmed_free, now["h1"].confirmed_free) == (False, True)
        assert now["h0"].route == pb.ROUTE_STATE_OUT
        recorders.forget()
        assert kinds((await engine.stub.Reclaim(reclaim)).operation) == {"h0": "DONE", "h1": "SKIPPED"}
        assert recorders["h1"].calls == []
        assert kinds((await engine.stub.Reclaim(reclaim)).operation) == {"h0": "SKIPPED", "h1": "SKIPPED"}


async def test_h44_a_lend_that_races_with_a_reclaim_is_aborted() -> None:
    """Both would believe that the GPUs are theirs."""
    async with recorded("h0:hybrid") as (engine, recorders):
        await lend(engine, "l", 0)
        gate = asyncio.Event()
        recorders["h0"].faults["sleep(2)"] = [gate]
        first = asyncio.ensure_future(engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN)))
        await until(lambda: "sleep(2)" in recorders["h0"].calls)
        begin = pb.BeginLendRequest(run_id=RUN, lend_id="l2")
        await refused(engine.stub.BeginLend(begin), "ABORTED", "RECLAIM_UNDER_WAY")
        second = asyncio.ensure_future(engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN)))
        gate.set()
        assert kinds((await first).operation) == {"h0": "DONE"}
        assert kinds((await second).operation) == {"h0": "SKIPPED"}
        assert recorders["h0"].calls.count("sleep(2)") == 1
        await engine.stub.BeginLend(begin)


async def test_h44_a_finish_that_races_with_a_reclaim_does_not_serve() -> None:
    """A lend that ends after its GPUs were taken back would send requests to the trainer's memory."""
    async with recorded("h0:hybrid") as (engine, recorders):
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        gate = asyncio.Event()
        recorders["h0"].faults["reset(encoder,multimodal,prefix)"] = [gate]
        finish = engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=0))
        await until(lambda: len(recorders["h0"].calls) == 1)
        reclaim = asyncio.ensure_future(engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN)))
        await until(lambda: engine.controller.fleet.get("h0").replica.lend_id == "")
        gate.set()
        outcomes = await partial(engine, finish, "ABORTED")
        assert outcomes["h0"].reason == "LEND_CLOSED"
        await reclaim
        assert (await replicas(engine))["h0"].confirmed_free
