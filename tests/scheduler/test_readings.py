"""What runs is read before a decision that rests on it."""

import asyncio

import pytest

from services.runtime.clock import MonotonicClock
from services.runtime.errors import unavailable
from services.scheduler.domain import events
from services.scheduler.readings import counters_of, on_hybrid, requests_of
from services.scheduler.reports import Reports
from services.scheduler.turns import Turns
from tests.scheduler.world import run_config, world
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2


def report(tokens: int) -> engine_pb2.ProgressReport:
    """One running request, `tokens` far."""
    request = engine_pb2.RequestProgress(
        join_key=engine_pb2.JoinKey(partition="train", group_id="g", trajectory=1),
        replica_id="standalone-0",
        role=engine_pb2.REPLICA_ROLE_STANDALONE,
        output_tokens=tokens,
    )
    return engine_pb2.ProgressReport(requests=[request], covered_share=1.0)


def last_reading(seen: list[events_pb2.RunEvent], point: events_pb2.DecisionPoint.ValueType) -> int | None:
    """Tokens in the last reading before the first decision at `point`."""
    tokens = None
    for event in seen:
        if event.HasField("request_progress") and event.request_progress.requests:
            tokens = event.request_progress.requests[0].done
        if event.HasField("decision_made") and event.decision_made.point == point:
            return tokens
    raise AssertionError("no such decision")


@pytest.mark.parametrize(("policy", "seen_tokens"), [("jit", 4321), ("shadow:jit", 4321), ("verl", None)])
async def test_a_policy_that_predicts_decides_on_what_runs_now(policy: str, seen_tokens: int | None) -> None:
    """A reading is up to 10 s old, some 500 tokens of each request; a policy that uses none must not pay for one."""
    # Domain time runs fast, so that no reading is fresh when the step ends.
    async with world(clock=MonotonicClock(0.001)) as w:
        w.engine.present = report(4321)
        trainer = await w.trainer(run_config(policy=policy))
        await w.buffer.set_depth(16)
        await trainer.step(1)
        assert last_reading(await trainer.events(), events_pb2.DECISION_POINT_STEP_END) == seen_tokens
        assert ("GetProgress" in w.journal) is (policy != "verl")


async def test_readings_that_are_fresh_are_not_taken_again() -> None:
    """Calls that follow each other at once would otherwise ask each engine for the same."""
    async with world() as w:
        trainer = await w.trainer(run_config(policy="jit"))
        await w.buffer.set_depth(16)
        await trainer.step(1)
        await trainer.step(2)
        assert w.journal.count("GetProgress") == 1


@pytest.mark.parametrize("silent", [True, False])
async def test_a_controller_that_gives_no_reading_does_not_keep_the_trainer(silent: bool) -> None:
    """One hung replica would make every decision of the run as late as its deadline."""
    async with world(clock=MonotonicClock(0.001), progress_timeout_s=0.1) as w:
        trainer = await w.trainer(run_config(policy="jit"))
        await w.buffer.set_depth(16)
        if silent:
            w.engine.script.gates["GetProgress"] = asyncio.Event()
        else:
            w.engine.script.failures["GetProgress"] = [unavailable("ENGINE_BUSY", "later") for _ in range(9)]
        async with asyncio.timeout(10):
            ended = await trainer.step(1)
        assert ended.decision.reason
        assert "GetProgress" in w.journal


def test_a_replica_of_neither_pool_is_of_no_pool() -> None:
    """A colocated replica, or one of a role to come, is no standalone one."""
    colocated = engine_pb2.REPLICA_ROLE_COLOCATED
    told = report(5)
    told.requests[0].role = colocated
    told.requests.add(join_key=engine_pb2.JoinKey(partition="val", group_id="v"))
    told.replicas.add(replica_id="c", role=colocated, running=2)
    (request,) = requests_of(told, "train", Turns(), Reports()).requests
    assert request == events.RunningRequest("g", 1, 5, "standalone-0", None)
    (reading,) = counters_of(told, {}).replicas
    assert (reading.hybrid, reading.running, reading.route) == (None, 2, events.RouteState.OUT)
    assert on_hybrid(None) is None
    assert on_hybrid(engine_pb2.Replica(spec=engine_pb2.ReplicaSpec(role=colocated))) is None
