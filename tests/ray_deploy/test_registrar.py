"""An agent's replicas at the controller, over real sockets; no Ray here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.engine.service import build
from services.engine.settings import EngineSettings
from services.runtime.host import ServiceHost
from services.runtime.permissions import Role
from tests.security.houses import Tokens
from turnout.client import AsyncEngineClient
from turnout.engine.v1 import engine_pb2
from turnout.ray._member import Member, members
from turnout.ray._registrar import Registrar
from turnout.ray._spec import parse

RUN = "r"
LISTEN = ["127.0.0.1:0"]


def agent() -> Member:
    group = {"name": "a", "role": "standalone", "resource": "x", "nodes": 1, "replicas": 2}
    return list(members(parse({"run": RUN, "trainer": {"resource": "head"}, "agents": [group]})))[-1]


def agent_host() -> ServiceHost:
    return build(EngineSettings(listen=LISTEN, agent=True, replica=["a-0-0:standalone", "a-0-1:standalone"]))


@asynccontextmanager
async def registering(target: Callable[[], str], controller: Callable[[], str]) -> AsyncIterator[Registrar]:
    registrar = Registrar(agent(), target, controller)
    running = asyncio.create_task(asyncio.to_thread(registrar.run))
    try:
        yield registrar
    finally:
        registrar.stop()
        await running


async def endpoints(controller: str, wanted: str) -> None:
    """Return once both replicas are registered at this address."""
    async with AsyncEngineClient(controller) as client:
        while True:
            answer = await client.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=RUN))
            if [replica.spec.endpoint for replica in answer.replicas] == [wanted] * 2:
                return
            await asyncio.sleep(0.05)


async def test_replicas_are_registered_again_at_a_controller_that_forgot_them() -> None:
    """Without a data directory a controller that is started again knows no replica, and nobody else would tell it."""
    settings = EngineSettings(listen=LISTEN, run=RUN)
    async with agent_host() as host:
        where = [""]
        async with registering(lambda: host.target, lambda: where[0]) as registrar:
            async with build(settings) as first:
                where[0] = first.target
                await endpoints(first.target, host.target)
            async with build(settings) as second:
                where[0] = second.target
                await endpoints(second.target, host.target)
        assert registrar.unregistered == ()


async def test_what_a_later_controller_refuses_is_told() -> None:
    """The status would show replicas as registered that no controller has."""
    async with agent_host() as host:
        where = [""]
        async with registering(lambda: host.target, lambda: where[0]) as registrar:
            async with build(EngineSettings(listen=LISTEN, run=RUN)) as first:
                where[0] = first.target
                while registrar.unregistered:  # noqa: ASYNC110 - it runs in a thread
                    await asyncio.sleep(0.05)
            async with build(EngineSettings(listen=LISTEN, run="another")) as second:
                where[0] = second.target
                while "another" not in registrar.problem:  # noqa: ASYNC110 - it runs in a thread
                    await asyncio.sleep(0.05)
        assert registrar.unregistered == ("a-0-0", "a-0-1")


async def test_an_agent_that_came_back_elsewhere_takes_the_place_of_the_one_before() -> None:
    """A node that comes back may have another address; REPLICA_EXISTS would keep its replicas out for ever."""
    async with build(EngineSettings(listen=LISTEN, run=RUN)) as controller:
        async with agent_host() as first, registering(lambda: first.target, lambda: controller.target):
            await endpoints(controller.target, first.target)
        async with agent_host() as second, registering(lambda: second.target, lambda: controller.target):
            await endpoints(controller.target, second.target)


async def test_the_actors_environment_tells_the_token_for_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A description's `env` is what reaches the actor; without a token of its own it could register nothing."""
    tokens = Tokens(tmp_path / "tokens.yaml", run=RUN)
    mine = tmp_path / "token"
    monkeypatch.setenv("TURNOUT_TOKEN_FILE", str(mine))
    settings = EngineSettings(listen=LISTEN, run=RUN, tokens_file=tokens.write())
    async with (
        build(settings) as controller,
        agent_host() as host,
        registering(lambda: host.target, lambda: controller.target) as registrar,
    ):
        while "token" not in registrar.problem:  # noqa: ASYNC110 - it runs in a thread
            await asyncio.sleep(0.05)
        mine.write_text(tokens.of(Role.TRAINER))
        while registrar.unregistered:  # noqa: ASYNC110 - it runs in a thread
            await asyncio.sleep(0.05)
