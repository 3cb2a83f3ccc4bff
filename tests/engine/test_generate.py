"""Generate, routes and progress over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.engine.backends.base import EngineRequest, engine_dead
from services.engine.domain.requests import Sampling
from services.engine.domain.tokens import Stretches
from services.runtime.clock import ManualClock
from tests.engine.helpers import (
    RUN,
    generate,
    generate_request,
    lend,
    only,
    refused,
    register,
    replicas,
    running,
    seconds,
    until,
)
from tests.engine.recorder import in_engines, recorded, requests_running
from turnout.engine.v1 import engine_pb2 as pb


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ()}, "prompt_token_ids"),
        ({"output_token_ids": [1]}, "output_segments"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, "sampling.temperature"),
        ({"delta_tokens": -1}, "delta_tokens"),
        ({"delta_interval": seconds(-1)}, "delta_interval"),
    ],
)
async def test_a_wrong_request_is_refused(fields: dict[str, Any], field: str) -> None:
    """Before it reaches an engine that it might kill."""
    async with recorded("s0:standalone") as (engine, recorders):
        error = await refused(generate(engine, "r", **fields), "INVALID_ARGUMENT", "INVALID_ARGUMENT")
        assert error.metadata["field"] == field
        assert recorders.journal == []


async def test_final_only_sends_two_messages() -> None:
    """A controller that relays hundreds of long outputs cannot afford more."""
    async with recorded("s0:standalone", scale=0.001) as (engine, _):
        output = await generate(engine, "r", max_tokens=5000)
        assert (output.deltas, output.placed, len(output.tokens)) == (0, ["s0"], 5000)


async def test_deltas_add_up_to_the_output() -> None:
    """And carry log-probabilities when asked for."""
    async with recorded("s0:standalone", scale=0.02) as (engine, _):
        final = await generate(engine, "a", max_tokens=300, sampling=pb.Sampling(seed=1))
        request = generate_request(
            "b",
            max_tokens=300,
            sampling=pb.Sampling(seed=1, logprobs=True),
            delta_tokens=50,
            delta_interval=seconds(0),
        )
        deltas = []
        async for response in engine.stub.Generate(request):
            if response.WhichOneof("event") == "delta":
                deltas.append(response.delta)
            elif response.WhichOneof("event") == "done":
                deltas.append(response.done.rest)
        assert [token for delta in deltas for token in delta.token_ids] == final.tokens
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
        assert len(deltas) == 6


async def test_the_budget_counts_the_output_so_far() -> None:
    """A continued output would otherwise grow beyond its limit with each move."""
    async with recorded("s0:standalone", scale=0.01) as (engine, _):
        segments = [pb.OutputSegment(tokens=5, weight_version=1, replica_id="old", continued=True)]
        more = await generate(engine, "a", max_tokens=8, output_token_ids=[7] * 5, output_segments=segments)
        assert (len(more.tokens), more.finish, [s.tokens for s in more.segments]) == (3, "LENGTH", [5, 3])
        full = await generate(engine, "b", max_tokens=5, output_token_ids=[7] * 5, output_segments=segments)
        assert (full.tokens, full.finish, full.placed, list(full.segments)) == ([], "LENGTH", [], segments)


async def test_requests_of_a_session_stay_together() -> None:
    """Until a lend clears the sessions: the fleet is another one then."""
    async with recorded("s0:standalone", "h0:hybrid", scale=0.01) as (engine, _):
        first = await generate(engine, "r0", session_id="s", max_tokens=3)
        assert first.placed == ["s0"]
        async with requests_running(engine, 1):
            again = await generate(engine, "r1", session_id="s", max_tokens=3)
            assert again.placed == ["s0"]
            await lend(engine, "l", 0)
            moved = await generate(engine, "r2", session_id="s", max_tokens=3)
            assert moved.placed == ["h0"]
        again = await generate(engine, "r3", session_id="s", max_tokens=3)
        assert again.placed == ["h0"]


async def test_a_validation_lend_keeps_the_sessions() -> None:
    """Validation does not change where multi-turn requests live."""
    async with recorded("s0:standalone", "s1:standalone", "h0:hybrid") as (engine, _):
        await generate(engine, "r", session_id="s", max_tokens=3)
        begin = pb.BeginLendRequest(run_id=RUN, lend_id="l", keep_sessions=True)
        await engine.stub.BeginLend(begin)
        assert engine.controller.fleet.placement.session_of("s") == "s0"


async def test_requests_wait_on_a_held_replica_and_start_when_it_serves() -> None:
    """HELD: placed, never forwarded."""
    async with recorded("h0:hybrid", scale=0.01) as (engine, recorders):
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        task = asyncio.create_task(generate(engine, "r", max_tokens=3))
        await until(lambda: engine.controller.fleet.placement.load("h0") == 1)
        state = (await replicas(engine))["h0"]
        assert (state.route, state.running, state.parked) == (pb.ROUTE_STATE_HELD, 0, 1)
        assert ("h0", "generate") not in recorders.journal
        await engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=0))
        assert (await task).placed == ["h0 parked", "h0"]


async def test_requests_leave_a_replica_whose_lend_fails() -> None:
    """They would wait for a replica that does not come."""
    async with recorded("h0:hybrid", "s0:standalone", scale=0.01) as (engine, recorders):
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        async with requests_running(engine, 1):
            task = asyncio.create_task(generate(engine, "r", max_tokens=3))
            await until(lambda: engine.controller.fleet.placement.load("h0") == 1)
            recorders["h0"].faults["reset(encoder,multimodal,prefix)"] = [engine_dead("crashed")]
            finish = pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=0)
            await refused(engine.stub.FinishLend(finish), "UNAVAILABLE", "PARTIAL")
            assert (await task).placed == ["h0 parked", "s0"]


async def test_an_aborted_lend_sends_requests_back_and_frees_the_gpus() -> None:
    """Whatever prefix of a lend happened."""
    async with recorded("h0:hybrid", "s0:standalone", scale=0.01) as (engine, _):
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        async with requests_running(engine, 1):
            task = asyncio.create_task(generate(engine, "r", max_tokens=3))
            await until(lambda: engine.controller.fleet.placement.load("h0") == 1)
            await engine.stub.AbortLend(pb.AbortLendRequest(run_id=RUN, lend_id="l"))
            assert (await task).placed == ["h0 parked", "s0"]
        assert (await replicas(engine))["h0"].confirmed_free
        await engine.stub.AbortLend(pb.AbortLendRequest(run_id=RUN, lend_id="l"))
        begin = engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        await refused(begin, "FAILED_PRECONDITION", "LEND_CLOSED")


async def test_only_hybrids_are_lent() -> None:
    """A standalone has no trainer to take GPUs from."""
    async with recorded("s0:standalone") as (engine, _):
        begin = pb.BeginLendRequest(run_id=RUN, lend_id="l", replica_ids=["s0"])
        await refused(engine.stub.BeginLend(begin), "INVALID_ARGUMENT", "NOT_HYBRID")
        begin = pb.BeginLendRequest(run_id=RUN, lend_id="l")
        await refused(engine.stub.BeginLend(begin), "FAILED_PRECONDITION", "NO_REPLICA")
        finish = pb.FinishLendRequest(run_id=RUN, lend_id="l")
        await refused(engine.stub.FinishLend(finish), "NOT_FOUND", "LEND_UNKNOWN")
        assert not (await engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN))).operation.outcomes


async def test_without_any_replica_a_request_is_told_so() -> None:
    """30 s of domain time, so that a restart of an agent goes unnoticed."""
    clock = ManualClock()
    async with running(clock) as engine:
        await register(engine, "h0")
        call = engine.stub.Generate(generate_request("r"))
        waiting = asyncio.ensure_future(anext(aiter(call)))
        await until(lambda: clock.pending > 0)
        await clock.advance(29.0)
        assert not waiting.done()
        await clock.advance(1.5)
        await refused(waiting, "UNAVAILABLE", "NO_REPLICA")


async def test_a_crash_loses_no_request() -> None:
    """Its output goes on elsewhere, token for token."""
    async with recorded("s0:standalone", "s1:standalone", scale=0.05, probe_interval=0.2) as (engine, recorders):
        fields: dict[str, Any] = {"max_tokens": 2000, "delta_tokens": 20, "delta_interval": seconds(0)}
        async with requests_running(engine, 4, sampling=pb.Sampling(seed=3), **fields) as tasks:
            await asyncio.sleep(0.05)
            recorders["s0"].engine._fail_all("killed")
            outputs = [await task for task in tasks]
        whole = await generate(engine, "whole", (0, 7), sampling=pb.Sampling(seed=3), max_tokens=2000)
        assert outputs[0].tokens == whole.tokens
        assert {len(output.tokens) for output in outputs} == {2000}
        assert {output.segments[-1].replica_id for output in outputs} == {"s1"}


async def test_a_request_that_every_engine_fails_is_given_up() -> None:
    """A loop without an end would hide it."""
    async with recorded("s0:standalone", scale=0.01) as (engine, recorders):

        async def broken(request: object) -> Any:
            raise engine_dead("this request kills it")
            yield

        recorders["s0"].generate = broken  # type: ignore[method-assign]
        await refused(generate(engine, "r"), "UNAVAILABLE", "ENGINE_DEAD")


async def test_a_client_that_goes_away_frees_its_place() -> None:
    """Otherwise engines decode for nobody."""
    async with recorded("s0:standalone", scale=1.0) as (engine, recorders):
        async with requests_running(engine, 3):
            assert len(recorders["s0"].engine.batch.streams) == 3
        await until(lambda: not recorders["s0"].engine.batch.streams)
        # The engine is told first, and the place is free once that has returned.
        await until(lambda: engine.controller.fleet.placement.load("s0") == 0)
        assert in_engines(engine) == 0


async def test_a_pinned_request_runs_there_or_not_at_all() -> None:
    """How a controller uses an agent: it has to be told when the replica cannot serve, and why."""
    async with recorded("h0:hybrid", "s0:standalone", scale=0.01) as (engine, _):
        output = await generate(engine, "r", replica_id="h0", max_tokens=3)
        assert (output.placed, output.segments[0].replica_id) == ([], "h0")
        await engine.stub.Sleep(pb.SleepRequest(run_id=RUN))
        await refused(generate(engine, "r", replica_id="h0"), "FAILED_PRECONDITION", "TAG_ASLEEP")
        await refused(generate(engine, "r", replica_id="x"), "NOT_FOUND", "REPLICA_NOT_FOUND")
        task = asyncio.create_task(generate(engine, "long", replica_id="s0", max_tokens=100_000))
        await until(lambda: in_engines(engine) == 1)
        await engine.stub.Pause(pb.PauseRequest(run_id=RUN, selector=only("s0")))
        assert (await task).finish == "ABORT"


# ----------------------------------------------------------------------------------------------------------- watching


async def test_routes_are_told_at_once_and_after_each_change() -> None:
    """A balancer that misses one sends requests to a sleeping engine."""
    async with recorded("h0:hybrid", "s0:standalone") as (engine, _):
        watch = aiter(engine.stub.WatchRoutes(pb.WatchRoutesRequest(run_id=RUN)))

        async def following(**wanted: str) -> None:
            while True:
                routes = {r.replica_id: pb.RouteState.Name(r.state)[12:] for r in (await anext(watch)).routes}
                if routes == wanted:
                    return

        async with asyncio.timeout(10):
            await following(h0="OUT", s0="SERVING")
            await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
            await following(h0="HELD", s0="SERVING")
            await engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=0))
            await following(h0="SERVING", s0="SERVING")
            await engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN))
            await following(h0="OUT", s0="SERVING")
            await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="s0"))
            await following(h0="OUT")


async def test_replicas_are_told_as_they_change() -> None:
    """All at first, then those that changed, and those that went."""
    async with recorded("h0:hybrid", "s0:standalone") as (engine, _):
        watch = aiter(engine.stub.WatchReplicas(pb.WatchReplicasRequest(run_id=RUN, selector=only("h0", "s0"))))
        async with asyncio.timeout(10):
            first = await anext(watch)
            assert [r.spec.replica_id for r in first.changed] == ["h0", "s0"]
            await generate(engine, "r", max_tokens=2)
            await engine.stub.Sleep(pb.SleepRequest(run_id=RUN))
            seen = set()
            while True:
                message = await anext(watch)
                seen |= {r.spec.replica_id for r in message.changed}
                if any(r.confirmed_free for r in message.changed):
                    break
            assert seen == {"h0"}
            await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="h0"))
            while not (message := await anext(watch)).removed:
                pass
            assert list(message.removed) == ["h0"]


@pytest.mark.parametrize("behind_agent", [False, True])
async def test_progress_tells_how_far_every_request_is(behind_agent: bool) -> None:
    """The just-in-time policy predicts from it, with final-only outputs too."""
    own = ["s0:standalone"]
    async with running(agent=True, replica=own, time_scale=0.1) as agent, running(time_scale=0.1) as engine:
        where = {"backend": "agent", "endpoint": agent.host.target} if behind_agent else {}
        await register(engine, "s0", "standalone", **where)
        key = pb.JoinKey(partition="train", group_id="g", trajectory=3, attempt=1)
        async with requests_running(engine, 2, join_key=key):
            before = (await engine.stub.GetProgress(pb.GetProgressRequest(run_id=RUN))).report
            await asyncio.sleep(0.2)
            report = (await engine.stub.GetProgress(pb.GetProgressRequest(run_id=RUN))).report
            assert report.at > before.at
            assert report.covered_share == 1.0
            assert [(r.join_key, r.replica_id, r.prompt_tokens) for r in report.requests] == [(key, "s0", 2)] * 2
            assert min(r.output_tokens for r in report.requests) > 0
            counters = report.replicas[0]
            assert (counters.replica_id, counters.running, counters.prefilled_tokens) == ("s0", 2, 4)
            assert counters.decoded_tokens >= sum(r.output_tokens for r in before.requests)


async def test_progress_reports_come_by_themselves() -> None:
    """One message per interval, whatever runs."""
    async with recorded("s0:standalone", scale=0.01) as (engine, _), requests_running(engine, 1):
        request = pb.WatchProgressRequest(run_id=RUN, interval=seconds(2))
        watch = engine.stub.WatchProgress(request)
        reports = []
        async for message in watch:
            reports.append(message.report)
            if len(reports) == 3:
                break
        watch.cancel()
        assert reports[2].at - reports[0].at >= 4.0
        for wrong in (1.0, 11.0):
            call = engine.stub.WatchProgress(pb.WatchProgressRequest(run_id=RUN, interval=seconds(wrong)))
            error = await refused(anext(aiter(call)), "INVALID_ARGUMENT", "INVALID_ARGUMENT")
            assert error.metadata["field"] == "interval"


async def test_requests_outside_generate_lower_the_covered_share() -> None:
    """A policy has to know how much it does not see."""
    async with recorded("s0:standalone", scale=1.0) as (engine, recorders), requests_running(engine, 1):
        foreign = recorders["s0"].engine.generate(EngineRequest("foreign", [1], Stretches(), 100, Sampling()))
        reading = asyncio.ensure_future(anext(foreign))
        await until(lambda: "foreign" in recorders["s0"].engine.batch.streams)
        report = (await engine.stub.GetProgress(pb.GetProgressRequest(run_id=RUN))).report
        assert report.covered_share == 0.5
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        assert isinstance(foreign, AsyncGenerator)
        await foreign.aclose()


async def test_metrics_tell_routes_and_load() -> None:
    """An operator sees which replicas serve, without a client."""
    async with (
        recorded("s0:standalone", scale=1.0, metrics_listen="127.0.0.1:0") as (engine, _),
        requests_running(engine, 2),
    ):
        url = engine.host.metrics_url
        assert url is not None
        with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
            lines = (await asyncio.to_thread(answer.read)).decode().splitlines()
        labels = 'replica_id="s0",role="standalone"'
        assert f'turnout_engine_route{{{labels},route="serving"}} 1.0' in lines
        assert f'turnout_engine_requests{{{labels},state="running"}} 2.0' in lines
        assert f'turnout_engine_health{{health="healthy",{labels}}} 1.0' in lines
