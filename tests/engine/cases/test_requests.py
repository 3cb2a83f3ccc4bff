"""Cases H35 to H37 and H40: requests, their ids and their aborts."""

from __future__ import annotations

import asyncio
import tracemalloc

from tests.engine.helpers import (
    RUN,
    generate,
    generate_request,
    refused,
    register,
    replicas,
    serving,
    until,
)
from tests.engine.recorder import in_engines, recorded, requests_running
from turnout.engine.v1 import engine_pb2 as pb


async def test_h35_an_id_is_taken_until_its_abort_is_complete() -> None:
    """Using an id again while its abort was travelling killed the new request."""
    async with recorded("s0:standalone", scale=1.0) as (engine, recorders), requests_running(engine, 1) as tasks:
        gate = asyncio.Event()
        recorders["s0"].faults["abort"] = [gate]
        abort = asyncio.ensure_future(engine.stub.Abort(pb.AbortRequest(run_id=RUN, request_ids=["running-0"])))
        await until(lambda: "abort" in recorders["s0"].calls)
        again = engine.stub.Generate(generate_request("running-0"))
        await refused(anext(aiter(again)), "ALREADY_EXISTS", "REQUEST_LIVE")
        gate.set()
        assert (await abort).aborted == 1
        assert (await tasks[0]).finish == "ABORT"
        assert (await generate(engine, "running-0", max_tokens=3)).finish == "LENGTH"


async def test_h35_two_live_requests_never_share_an_id() -> None:
    """One abort ended both, and counts went below zero."""
    async with recorded("s0:standalone", scale=1.0) as (engine, _), requests_running(engine, 1):
        again = engine.stub.Generate(generate_request("running-0"))
        error = await refused(anext(aiter(again)), "ALREADY_EXISTS", "REQUEST_LIVE")
        assert error.metadata["request_id"] == "running-0"
        assert in_engines(engine) == 1


async def test_h35_aborts_may_be_repeated() -> None:
    """An abort that is sent twice must not make counts negative."""
    async with recorded("s0:standalone", scale=1.0) as (engine, _), requests_running(engine, 3) as tasks:
        nothing = await engine.stub.Abort(pb.AbortRequest(run_id=RUN))
        assert nothing.aborted == 0
        twice = pb.AbortRequest(run_id=RUN, request_ids=["running-0"])
        answers = await asyncio.gather(engine.stub.Abort(twice), engine.stub.Abort(twice))
        assert sum(answer.aborted for answer in answers) >= 1
        assert (await engine.stub.Abort(twice)).aborted == 0
        everything = pb.AbortRequest(run_id=RUN, all_requests=True)
        assert (await engine.stub.Abort(everything)).aborted == 2
        assert {(await task).finish for task in tasks} == {"ABORT"}
        state = (await replicas(engine))["s0"]
        assert (state.running, state.parked) == (0, 0)


async def test_h35_an_abort_keeps_the_tokens_so_far() -> None:
    """Work that was paid for is the caller's."""
    async with recorded("s0:standalone", scale=0.01) as (engine, _), requests_running(engine, 1) as tasks:
        await asyncio.sleep(0.05)
        await engine.stub.Abort(pb.AbortRequest(run_id=RUN, request_ids=["running-0"]))
        output = await tasks[0]
        assert output.finish == "ABORT"
        assert output.tokens
        assert [(s.tokens, s.replica_id, s.continued) for s in output.segments] == [(len(output.tokens), "s0", False)]


async def test_h36_aborts_of_unknown_ids_are_not_remembered() -> None:
    """Remembering every abort for ever leaked memory; remembering some suppressed requests that came later."""
    async with recorded("s0:standalone", scale=0.001) as (engine, _):

        async def abort_unknown(batch: int) -> None:
            ids = [f"unknown-{batch}-{i}" for i in range(10_000)]
            assert (await engine.stub.Abort(pb.AbortRequest(run_id=RUN, request_ids=ids))).aborted == 0

        await abort_unknown(0)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for batch in range(1, 20):
            await abort_unknown(batch)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # 190 000 ids of 15 characters would be some 12 MB.
        assert after - before < 2_000_000
        await engine.stub.Abort(pb.AbortRequest(run_id=RUN, request_ids=["x"]))
        assert (await generate(engine, "x", max_tokens=3)).finish == "LENGTH"


async def test_h37_control_calls_do_not_queue_behind_traffic() -> None:
    """A weight sync waited on requests that could not finish, since its calls queued behind theirs."""
    async with (
        recorded("s0:standalone", "s1:standalone", scale=1.0) as (engine, recorders),
        requests_running(engine, 500),
        asyncio.timeout(20),
    ):
        await replicas(engine)
        assert await serving(engine)
        await engine.stub.Pause(pb.PauseRequest(run_id=RUN))
        assert in_engines(engine) == 0
        assert [recorder.calls for recorder in recorders.by_id.values()] == [["pause(abort)"]] * 2


async def test_h40_completions_after_a_removal_change_nothing() -> None:
    """A late completion made the load negative, and entries kept for ever starved a replica at the same address."""
    async with (
        recorded("s0:standalone", "s1:standalone", scale=1.0) as (engine, recorders),
        requests_running(engine, 4),
    ):
        placement = engine.controller.fleet.placement
        assert (placement.load("s0"), placement.load("s1")) == (2, 2)
        lost = recorders["s0"]
        await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="s0"))
        await until(lambda: placement.load("s1") == 4)
        assert placement.load("s0") == 0
        await register(engine, "s0", "standalone")
        assert lost is not recorders["s0"]
        await until(lambda: not lost.engine.batch.streams)
        assert (await replicas(engine))["s0"].running == 0
        new = asyncio.create_task(generate(engine, "new", max_tokens=100_000))
        await until(lambda: placement.load("s0") == 1)
        new.cancel()
        await asyncio.gather(new, return_exceptions=True)
        await until(lambda: placement.load("s0") == 0)
