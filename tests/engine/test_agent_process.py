"""Agents as real processes that are killed, stopped, hung and restarted under a controller."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.engine.reference.faults import EXIT_CODE
from tests.engine.helpers import (
    RUN,
    Engine,
    kinds,
    only,
    partial,
    register,
    replicas,
    role,
    running,
    seconds,
    until,
    update,
)
from tests.engine.recorder import requests_running
from turnout.engine.v1 import engine_pb2 as pb

TURNOUT = Path(sys.executable).with_name("turnout")
QUICK: dict[str, Any] = {"probe_interval": 0.2, "probe_timeout": 1.0, "time_scale": 0.05}


class AgentProcess:
    """A process of `turnout engine serve --agent`."""

    def __init__(self, process: asyncio.subprocess.Process, target: str) -> None:
        self.process = process
        self.target = target

    async def ended(self) -> int:
        """Its exit code."""
        async with asyncio.timeout(20):
            return await self.process.wait()


@asynccontextmanager
async def agent(
    *own: str, listen: str = "127.0.0.1:0", faults: bool = False, more: tuple[str, ...] = ()
) -> AsyncIterator[AgentProcess]:
    """An agent with these replicas and further options; it is gone afterwards, however the test ended."""
    arguments = ["engine", "serve", "--agent", "--listen", listen, "--time-scale", "0.05"]
    arguments += ["--weights-bytes", "65536", "--kv-bytes", "65536", "--log-level", "error"]
    for replica in own:
        arguments += ["--replica", replica]
    arguments += more
    if faults:
        arguments.append("--fault-injection")
    process = await asyncio.create_subprocess_exec(TURNOUT, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode().strip()
        yield AgentProcess(process, line.rpartition(" ")[2])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def health(engine: Engine, replica_id: str, wanted: pb.ReplicaHealth.ValueType) -> None:
    """Wait until a replica has this health."""

    async def reached() -> bool:
        return (await replicas(engine))[replica_id].health == wanted

    await until(reached, timeout=20)


async def register_at(engine: Engine, agent: AgentProcess, replica_id: str, role: str = "standalone") -> None:
    """Register a replica of an agent."""
    await register(engine, replica_id, role, backend="agent", endpoint=agent.target)


def fault(engine: Engine, replica_id: str, method: str, **arguments: object) -> Any:
    """Break an engine on purpose."""
    return engine.stub.CollectiveRpc(
        pb.CollectiveRpcRequest(
            run_id=RUN,
            selector=only(replica_id),
            method=method,
            arguments_json=json.dumps({"kwargs": arguments}),
            timeout=seconds(5),
        )
    )


@pytest.mark.parametrize("how", ["killed", "told to exit"])
async def test_h38_a_killed_agent_loses_no_request_and_must_be_updated(how: str) -> None:
    """The process is gone; when it comes back it has other weights than the run."""
    async with (
        agent("s0:standalone", faults=True) as first,
        agent("s1:standalone") as second,
        running(fault_injection=True, **QUICK) as engine,
    ):
        await register_at(engine, first, "s0")
        await register_at(engine, second, "s1")
        await update(engine, role("standalone"), 3)
        async with requests_running(engine, 6, max_tokens=3000) as tasks:
            if how == "killed":
                first.process.kill()
                assert await first.ended() == -signal.SIGKILL
            else:
                await partial(engine, fault(engine, "s0", "fault_exit"), "UNAVAILABLE")
                assert await first.ended() == EXIT_CODE
            outputs = [await task for task in tasks]
            assert {len(output.tokens) for output in outputs} == {3000}
            assert {output.segments[-1].replica_id for output in outputs} == {"s1"}
        await health(engine, "s0", pb.REPLICA_HEALTH_DEAD)
        async with agent("s0:standalone", listen=first.target):
            await health(engine, "s0", pb.REPLICA_HEALTH_HEALTHY)
            state = (await replicas(engine))["s0"]
            assert (state.route, state.weights) == (pb.ROUTE_STATE_OUT, pb.WEIGHTS_STATE_DISCARDED)
            await update(engine, role("standalone"), 4)
            now = await replicas(engine)
            assert {(r.route, r.weight_version) for r in now.values()} == {(pb.ROUTE_STATE_SERVING, 4)}


async def test_h38_the_death_of_an_idle_agent_is_noticed_without_a_probe() -> None:
    """No request and no command is there to fail, and the next probe is an hour away."""
    async with agent("s0:standalone") as first, running(probe_interval=3600) as engine:
        await register_at(engine, first, "s0")
        first.process.kill()
        await health(engine, "s0", pb.REPLICA_HEALTH_DEAD)


async def test_h38_a_stopped_agent_is_unresponsive_and_serves_again_when_it_goes_on() -> None:
    """It keeps its connections open and answers nothing, like a process in a debugger or out of memory."""
    async with (
        agent("s0:standalone") as first,
        agent("h1:hybrid") as second,
        running(**QUICK) as engine,
    ):
        await register_at(engine, first, "s0")
        await register_at(engine, second, "h1", "hybrid")
        first.process.send_signal(signal.SIGSTOP)
        await health(engine, "s0", pb.REPLICA_HEALTH_UNRESPONSIVE)
        call = engine.stub.Pause(pb.PauseRequest(run_id=RUN, timeout=seconds(0.5)))
        outcomes = await partial(engine, call, "DEADLINE_EXCEEDED")
        assert outcomes["h1"].kind == pb.OUTCOME_KIND_DONE
        first.process.send_signal(signal.SIGCONT)
        await health(engine, "s0", pb.REPLICA_HEALTH_HEALTHY)
        assert (await replicas(engine))["s0"].route == pb.ROUTE_STATE_SERVING


async def test_h38_an_engine_that_hangs_behind_a_living_agent() -> None:
    """The agent answers, its engine does not: health must be the engine's."""
    async with agent("h0:hybrid", "h1:hybrid", faults=True) as node, running(fault_injection=True, **QUICK) as engine:
        await register_at(engine, node, "h0", "hybrid")
        await register_at(engine, node, "h1", "hybrid")
        await fault(engine, "h0", "fault_hang")
        sleep = pb.SleepRequest(run_id=RUN, timeout=seconds(1))
        outcomes = await partial(engine, engine.stub.Sleep(sleep), "DEADLINE_EXCEEDED")
        assert outcomes["h1"].kind == pb.OUTCOME_KIND_DONE
        await health(engine, "h0", pb.REPLICA_HEALTH_UNRESPONSIVE)
        assert not (await replicas(engine))["h0"].confirmed_free
        await fault(engine, "h0", "fault_heal")
        await health(engine, "h0", pb.REPLICA_HEALTH_HEALTHY)
        assert kinds((await engine.stub.Sleep(pb.SleepRequest(run_id=RUN))).operation)["h1"] == "SKIPPED"
        assert all(replica.confirmed_free for replica in (await replicas(engine)).values())
        await fault(engine, "h0", "fault_die")
        await health(engine, "h0", pb.REPLICA_HEALTH_DEAD)


async def test_an_agent_that_stops_in_order_hands_its_requests_over() -> None:
    """SIGTERM on a node must not cost the run its rollouts."""
    async with (
        agent("s0:standalone") as first,
        agent("s1:standalone") as second,
        running(**QUICK) as engine,
    ):
        await register_at(engine, first, "s0")
        await register_at(engine, second, "s1")
        async with requests_running(engine, 4, max_tokens=3000) as tasks:
            first.process.terminate()
            assert await first.ended() == 0
            assert {len((await task).tokens) for task in tasks} == {3000}
