"""Case H38: a replica that is alive and hangs. Case H39: pause modes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.engine.backends.base import engine_dead
from services.runtime.errors import unavailable
from tests.engine.helpers import (
    RUN,
    Engine,
    generate,
    kinds,
    only,
    partial,
    refused,
    replicas,
    seconds,
    serving,
    until,
    update,
)
from tests.engine.recorder import in_engines, recorded, requests_running
from turnout.engine.v1 import engine_pb2 as pb

FOUR = ("h1:hybrid", "h2:hybrid", "h3:hybrid", "h4:hybrid")
FAST: dict[str, Any] = {"probe_interval": 0.2, "probe_timeout": 0.3}
HEALTHY, UNRESPONSIVE, DEAD = (
    pb.REPLICA_HEALTH_HEALTHY,
    pb.REPLICA_HEALTH_UNRESPONSIVE,
    pb.REPLICA_HEALTH_DEAD,
)


async def healths(engine: Engine) -> dict[str, int]:
    """Health by replica."""
    return {key: replica.health for key, replica in (await replicas(engine)).items()}


async def are(engine: Engine, wanted: dict[str, int]) -> None:
    """Wait until the replicas have this health."""

    async def reached() -> bool:
        return await healths(engine) == wanted

    await until(reached)


async def test_h38_hung_and_dead_replicas_are_told_apart_and_delay_nobody() -> None:
    """A process answered health checks while its engine hung, and requests were routed to it for an hour."""
    async with recorded(*FOUR, **FAST) as (engine, recorders):
        hang = asyncio.Event()
        recorders["h1"].faults = {"probe": [hang], "pause(abort)": [hang]}
        recorders["h2"].faults = {"sleep(2)": [hang]}
        recorders["h3"].engine._fail_all("killed")
        await are(engine, {"h1": UNRESPONSIVE, "h2": HEALTHY, "h3": DEAD, "h4": HEALTHY})
        outcomes = await partial(
            engine, engine.stub.Sleep(pb.SleepRequest(run_id=RUN, timeout=seconds(0.5))), "DEADLINE_EXCEEDED"
        )
        assert {key: o.code for key, o in outcomes.items()} == {"h1": 4, "h2": 4, "h3": 14, "h4": 0}
        assert outcomes["h4"].duration.ToMilliseconds() < outcomes["h2"].duration.ToMilliseconds()
        assert await healths(engine) == {"h1": UNRESPONSIVE, "h2": UNRESPONSIVE, "h3": DEAD, "h4": HEALTHY}
        assert await serving(engine)
        hang.set()
        recorders["h1"].faults.clear()
        await are(engine, {"h1": HEALTHY, "h2": HEALTHY, "h3": DEAD, "h4": HEALTHY})


async def test_h38_health_is_not_serving_when_no_replica_answers() -> None:
    """A load balancer in front has to see that there is nobody behind."""
    async with recorded("s0:standalone", **FAST) as (engine, recorders):
        assert await serving(engine)
        recorders["s0"].faults["probe"] = [asyncio.Event()]
        await are(engine, {"s0": UNRESPONSIVE})
        assert not await serving(engine)
        recorders["s0"].faults.clear()
        await are(engine, {"s0": HEALTHY})
        assert await serving(engine)


async def test_h38_requests_leave_a_hung_replica() -> None:
    """A request on a hung engine would wait for ever."""
    async with (
        recorded("s0:standalone", "s1:standalone", **FAST) as (engine, recorders),
        requests_running(engine, 4, max_tokens=20_000),
    ):
        recorders["s0"].faults["probe"] = [asyncio.Event()]
        await until(lambda: engine.controller.fleet.placement.load("s1") == 4)


async def test_h38_a_dead_replica_serves_only_after_a_full_update() -> None:
    """A restarted engine has lost its weights and says nothing of it."""
    async with recorded("s0:standalone", **FAST) as (engine, recorders):
        recorders["s0"].faults["probe"] = [engine_dead("killed")]
        await are(engine, {"s0": DEAD})
        recorders["s0"].faults.clear()
        await are(engine, {"s0": HEALTHY})
        state = (await replicas(engine))["s0"]
        assert (state.route, state.weights) == (pb.ROUTE_STATE_OUT, pb.WEIGHTS_STATE_DISCARDED)
        await update(engine, only("s0"), 1)
        assert (await replicas(engine))["s0"].route == pb.ROUTE_STATE_SERVING


def pause(engine: Engine, mode: str, **fields: Any) -> Any:
    """A Pause call."""
    return engine.stub.Pause(pb.PauseRequest(run_id=RUN, mode=pb.PauseMode.Value(f"PAUSE_MODE_{mode}"), **fields))


def resume(engine: Engine) -> Any:
    """A Resume call."""
    return engine.stub.Resume(pb.ResumeRequest(run_id=RUN))


@pytest.mark.parametrize("mode", ["ABORT", "WAIT", "KEEP"])
async def test_h39_modes_differ_for_running_requests_and_hold_new_ones(mode: str) -> None:
    """A wrapper accepted wait and behaved like keep."""
    async with recorded("s0:standalone", scale=0.3) as (engine, recorders):
        for _ in range(3):
            async with requests_running(engine, 3, max_tokens=200) as tasks:
                await pause(engine, mode)
                streams = recorders["s0"].engine.batch.streams
                assert len(streams) == (3 if mode == "KEEP" else 0)
                if mode == "WAIT":
                    assert {len((await task).tokens) for task in tasks} == {200}
                new = asyncio.create_task(generate(engine, "new", (9,), max_tokens=20))
                await until(lambda: engine.controller.fleet.placement.load("s0") == (1 if mode == "WAIT" else 4))
                assert len(streams) == (3 if mode == "KEEP" else 0)
                await resume(engine)
                assert {len((await task).tokens) for task in tasks} == {200}
                assert (await new).placed == ["s0 parked", "s0"]
                assert in_engines(engine) == 0


async def test_h39_an_unknown_mode_changes_nothing() -> None:
    """A mode that nobody knows must not act like the default."""
    async with recorded("s0:standalone") as (engine, recorders):
        unknown: Any = 99
        error = await refused(
            engine.stub.Pause(pb.PauseRequest(run_id=RUN, mode=unknown)), "INVALID_ARGUMENT", "INVALID_ARGUMENT"
        )
        assert error.metadata["field"] == "mode"
        assert recorders["s0"].calls == []
        assert not (await replicas(engine))["s0"].paused


async def test_h39_a_second_pause_in_another_mode_is_refused() -> None:
    """Whoever asked for wait would get keep."""
    async with recorded("s0:standalone") as (engine, _):
        await pause(engine, "KEEP")
        assert kinds((await pause(engine, "KEEP")).operation) == {"s0": "SKIPPED"}
        outcomes = await partial(engine, pause(engine, "ABORT"), "FAILED_PRECONDITION")
        assert outcomes["s0"].reason == "PAUSED_IN_OTHER_MODE"


async def test_h39_resuming_what_runs_is_fine() -> None:
    """Resume is repeated after a lost reply."""
    async with recorded("s0:standalone") as (engine, recorders):
        assert kinds((await resume(engine)).operation) == {"s0": "SKIPPED"}
        assert recorders["s0"].calls == []


@pytest.mark.parametrize("told_as", ["dead", "unreachable"])
async def test_h38_a_death_is_noticed_while_a_call_to_the_engine_hangs(told_as: str) -> None:
    """The call would hang until its deadline, which is minutes away, and the trainer with it."""
    async with recorded("h1:hybrid", "h2:hybrid", probe_interval=3600) as (engine, recorders):
        recorder = recorders["h1"]
        recorder.faults["sleep(2)"] = [asyncio.Event()]
        call = asyncio.ensure_future(
            partial(engine, engine.stub.Sleep(pb.SleepRequest(run_id=RUN, timeout=seconds(50))), "UNAVAILABLE")
        )
        await until(lambda: "sleep(2)" in recorder.calls)
        gone = engine_dead("gone") if told_as == "dead" else unavailable("CONNECTION", "refused")
        recorder.faults["probe"] = [gone]
        # Ten times less than its deadline; within a second where nothing else keeps the machine busy.
        async with asyncio.timeout(5):
            outcomes = await call
        assert (outcomes["h1"].reason, outcomes["h2"].kind) == ("ENGINE_DEAD", pb.OUTCOME_KIND_DONE)
        assert (await healths(engine))["h1"] == DEAD


async def test_h38_a_slow_command_of_a_living_engine_is_waited_for() -> None:
    """Looking after an engine must not cut what takes it longer than a look."""
    async with recorded("h1:hybrid", scale=1.0, probe_interval=3600) as (engine, recorders):
        release = asyncio.Event()
        recorders["h1"].faults["sleep(2)"] = [release]
        asyncio.get_running_loop().call_later(1.5, release.set)
        answer = await engine.stub.Sleep(pb.SleepRequest(run_id=RUN))
        assert kinds(answer.operation) == {"h1": "DONE"}
        assert recorders["h1"].calls.count("sleep(2)") == 1
