"""Trainers name the servers that the scheduler calls, and replicas the agents that the controller calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from services.runtime.host import StartError
from services.runtime.permissions import Role
from services.scheduler.service import build
from services.scheduler.settings import SchedulerSettings
from tests.runtime.certificates import Authority
from tests.scheduler.world import world
from tests.security.houses import Tokens, house
from turnout.client import AsyncEngineClient, AsyncSchedulerClient, ClientOptions, FailedPrecondition, Security
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

CONFIG = scheduler_pb2.RunConfig(
    train_batch_size=2, parameter_sync_step=1, mini_batch_size=2, total_training_steps=1, hybrid_gpus=1, group_size=1
)


class Thief(grpc.GenericRpcHandler):
    """Notes the tokens that it is shown."""

    def __init__(self) -> None:
        self.tokens: set[str] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        self.tokens |= {str(value) for key, value in handler_call_details.invocation_metadata if key == "authorization"}


@asynccontextmanager
async def thief(address: str) -> AsyncIterator[tuple[Thief, str]]:
    """A server of the trainer's own, and its target."""
    heard, server = Thief(), grpc.aio.server()
    server.add_generic_rpc_handlers([heard])
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield heard, address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    made = Tokens(tmp_path / "tokens.yaml")
    made.write()
    return made


def _settings(tmp_path: Path, tokens: Tokens) -> dict[str, object]:
    held = tmp_path / "service.token"
    held.write_text(tokens.all(Role.SERVICE))
    return {"tokens_file": tokens.path, "peer_token_file": held}


async def _open(scheduler: str, tokens: Tokens, target: str) -> None:
    options = ClientOptions(security=Security(token=tokens.of(Role.TRAINER)))
    async with AsyncSchedulerClient(scheduler, options) as client:
        await client.calls.OpenRun(
            scheduler_pb2.OpenRunRequest(run_id="mine", config=CONFIG, buffer_target=target, engine_target=target)
        )


async def test_a_scheduler_shows_its_token_to_no_socket_of_a_trainer(tmp_path: Path, tokens: Tokens) -> None:
    """A socket shows no certificate: with a file of its own, the trainer of one run got the token for all of them."""
    settings = _settings(tmp_path, tokens) | {"peer_ca": str(Authority(tmp_path / "tls").ca)}
    async with thief(f"unix:{tmp_path}/thief.sock") as (heard, target), house("scheduler", **settings) as (host, _):
        with pytest.raises(FailedPrecondition, match="allow_peer"):
            await _open(host.target, tokens, target)
    assert heard.tokens == set()


async def test_a_controller_shows_its_token_to_no_agent_that_it_may_not_call(tmp_path: Path, tokens: Tokens) -> None:
    """A trainer registers replicas, and names the agent of each."""
    settings = _settings(tmp_path, tokens) | {"allow_peer": ["agent-*:50061"]}
    async with thief("127.0.0.1:0") as (heard, target), house("engine", **settings) as (host, _):
        options = ClientOptions(security=Security(token=tokens.of(Role.TRAINER)))
        async with AsyncEngineClient(host.target, options) as client:
            spec = engine_pb2.ReplicaSpec(
                replica_id="r0", backend="agent", endpoint=target, role=engine_pb2.REPLICA_ROLE_STANDALONE
            )
            with pytest.raises(FailedPrecondition, match="allow_peer"):
                await client.calls.Register(engine_pb2.RegisterRequest(run_id="mine", spec=spec))
    assert heard.tokens == set()


async def test_a_scheduler_does_not_start_with_a_run_whose_target_it_may_no_longer_call(tmp_path: Path) -> None:
    """A list that was made narrower would count for new runs alone."""
    async with world(data_dir=tmp_path) as w:
        await w.open()
    settings = SchedulerSettings(listen=["127.0.0.1:0"], data_dir=tmp_path, allow_peer=["buffer:50051"])
    with pytest.raises(StartError, match="no allow_peer names it"):
        await build(settings).start()
