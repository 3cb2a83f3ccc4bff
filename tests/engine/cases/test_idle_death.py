"""An engine that dies while nobody asks it for anything. No probe is due for an hour in any of these tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from services.engine.backends.base import Backend
from services.engine.cluster.verl import VerlSurface
from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import LOOK_S, GuardedBackend
from services.engine.guarded.surface import Surface
from services.engine.health import DOUBT_S
from services.engine.sglang import http as sglang
from services.engine.vllm import http as vllm
from services.runtime.clock import MonotonicClock
from tests.engine.guarded.fake import FakeSurface
from tests.engine.helpers import RUN, Engine, register, running, until
from tests.engine.recorder import recorded
from tests.sglang.server import SglangServer
from tests.verl.server import ServerActor, VerlServer
from tests.vllm.test_http import Server
from turnout.engine.v1 import engine_pb2 as pb

NEVER_S = 3600.0
Kill = Callable[[], None]


async def told_dead(engine: Engine, replica_id: str) -> None:
    """Wait until whoever watches the replicas is told."""
    async with asyncio.timeout(20):
        async for told in engine.stub.WatchReplicas(pb.WatchReplicasRequest(run_id=RUN)):
            for replica in told.changed:
                if (replica.spec.replica_id, replica.health) == (replica_id, pb.REPLICA_HEALTH_DEAD):
                    assert replica.route == pb.ROUTE_STATE_OUT
                    return


async def in_process() -> tuple[Surface, Kill]:
    surface = FakeSurface()
    return surface, lambda: setattr(surface, "dead", True)


async def core_behind_http() -> tuple[Surface, Kill]:
    server = Server()
    surface = await vllm.connect("http://engine/", httpx.MockTransport(server))
    return surface, lambda: server.answers.update({"/health": lambda _: httpx.Response(503)})


async def whole_http_server() -> tuple[Surface, Kill]:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    server = Server()
    surface = await vllm.connect("http://engine/", httpx.MockTransport(server))
    return surface, lambda: server.answers.update({"/health": refuse})


async def sglang_server() -> tuple[Surface, Kill]:
    server = SglangServer()
    surface = await sglang.connect("http://engine/", httpx.MockTransport(server))
    return surface, lambda: setattr(server, "dead", True)


async def verl_server() -> tuple[Surface, Kill]:
    server = VerlServer()
    surface = VerlSurface(ServerActor(server).as_actor())
    await surface.find_out()
    return surface, lambda: setattr(server.engine, "errored", True)


@pytest.mark.parametrize("start", [in_process, core_behind_http, whole_http_server, sglang_server, verl_server])
async def test_h38_the_death_of_an_idle_engine_is_noticed(start: Callable[[], Awaitable[tuple[Surface, Kill]]]) -> None:
    """A trainer lent its GPUs to an engine that had died seconds before, and waited for the whole lend."""
    surface, kill = await start()

    async def open_backend(spec: ReplicaSpec) -> Backend:
        return GuardedBackend(spec, surface, MonotonicClock())

    async with running(open_backend=open_backend, probe_interval=NEVER_S) as engine:
        await register(engine, "s0", "standalone")
        kill()
        await told_dead(engine, "s0")


def test_h38_an_idle_engine_is_looked_at_often_enough() -> None:
    """A death is known within a second: one look, and the probe that it calls for."""
    assert LOOK_S <= 0.5


async def test_h38_the_death_of_an_idle_reference_engine_is_noticed() -> None:
    """It tells of its death by itself."""
    async with recorded("s0:standalone", probe_interval=NEVER_S) as (engine, recorders):
        recorders["s0"].engine._fail_all("killed")
        await told_dead(engine, "s0")


async def test_h38_the_death_of_an_idle_engine_is_noticed_through_its_agent() -> None:
    """The agent lives on, so the connection to it says nothing; its other engine stays."""
    own = ["s0:standalone", "s1:standalone"]
    async with (
        running(agent=True, replica=own, fault_injection=True, probe_interval=NEVER_S) as agent,
        running(probe_interval=NEVER_S) as engine,
    ):
        for replica_id in ("s0", "s1"):
            await register(engine, replica_id, "standalone", backend="agent", endpoint=agent.host.target)
        selector = pb.ReplicaSelector(replica_ids=["s0"])
        await agent.stub.CollectiveRpc(pb.CollectiveRpcRequest(run_id=RUN, selector=selector, method="fault_die"))
        await told_dead(engine, "s0")
        assert engine.controller.fleet.get("s1").serves()


async def test_an_engine_whose_replica_was_removed_is_watched_no_longer() -> None:
    """Its watch went on for a whole interval, over connections that were closed under it: a stack trace in the log."""
    watching, ended = asyncio.Event(), asyncio.Event()
    async with recorded("s0:standalone", probe_interval=NEVER_S) as (engine, recorders):

        async def watch() -> None:
            watching.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        recorders["s0"].watch = watch  # type: ignore[method-assign]
        engine.controller.fleet.get("s0").probe_wanted.set()
        await watching.wait()
        await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="s0"))
        async with asyncio.timeout(20):
            await ended.wait()


async def test_a_sign_of_death_that_a_probe_refutes_costs_little() -> None:
    """An agent that drains says so and lives on for a while; to probe it all the time would help nobody."""
    async with recorded("s0:standalone", probe_interval=NEVER_S) as (engine, recorders):
        probes: list[float] = []
        recorder = recorders["s0"]
        probe = recorder.engine.probe

        async def counted() -> object:
            probes.append(time.monotonic())
            return await probe()

        recorder.engine.probe = counted  # type: ignore[method-assign, assignment]
        recorder.engine._died.set()
        await until(lambda: len(probes) >= 3)
        assert probes[2] - probes[0] >= DOUBT_S
        assert engine.controller.fleet.get("s0").serves()
