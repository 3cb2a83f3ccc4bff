"""Trainers name the servers that the scheduler calls, and replicas the agents that the controller calls."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from services.runtime.host import StartError
from services.runtime.permissions import Role
from services.runtime.tls import ServerTls
from services.scheduler.service import build
from services.scheduler.settings import SchedulerSettings
from tests.engine.helpers import refused, running
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


@asynccontextmanager
async def web_server(context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[list[str], str]]:
    """A server that knows no route, what it was asked, and its HOST:PORT."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0].decode())
            writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield asked, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _engine(backend: str, endpoint: str) -> engine_pb2.RegisterRequest:
    role = engine_pb2.REPLICA_ROLE_STANDALONE
    spec = engine_pb2.ReplicaSpec(replica_id="r0", backend=backend, endpoint=endpoint, role=role)
    return engine_pb2.RegisterRequest(run_id="mine", spec=spec)


@pytest.mark.parametrize("backend", ["vllm-http", "sglang-http"])
async def test_a_controller_calls_no_engine_that_it_may_not_call(backend: str) -> None:
    """Whoever may register replicas could let the controller call any web server that it reaches."""
    async with web_server() as (asked, target), running(allow_peer=["vllm-*:8000"]) as engine:
        for url in (f"http://{target}", f"http://vllm-0:8000@{target}/", "http://[::1]:8000", "https://vllm-0"):
            await refused(engine.stub.Register(_engine(backend, url)), "FAILED_PRECONDITION", "PEER_SECURITY")
    assert asked == []
    async with web_server() as (asked, target), running(allow_peer=[target]) as engine:
        await refused(engine.stub.Register(_engine(backend, f"http://{target}/")), "FAILED_PRECONDITION", "NOT_OFFERED")
    assert asked


@pytest.mark.parametrize("backend", ["vllm-http", "sglang-http"])
async def test_an_https_engine_is_vouched_for_by_the_authority_of_the_peers(backend: str, tmp_path: Path) -> None:
    """The cluster's own authority is none of those that the system trusts."""
    ours, strangers = Authority(tmp_path / "ours"), Authority(tmp_path / "strangers")
    context = ServerTls(*ours.issue("engine", "127.0.0.1"), ours.ca).context()
    cert, key = ours.issue("controller", "controller")
    async with web_server(context) as (asked, target):
        for authority, code, reason in (
            (strangers, "UNAVAILABLE", "ENGINE_UNREACHABLE"),
            (ours, "FAILED_PRECONDITION", "NOT_OFFERED"),
        ):
            async with running(peer_ca=str(authority.ca), peer_cert=cert, peer_key=key) as engine:
                await refused(engine.stub.Register(_engine(backend, f"https://{target}")), code, reason)
            assert bool(asked) == (authority is ours)
        async with running(peer_ca=str(tmp_path / "none.pem")) as engine:
            register = engine.stub.Register(_engine(backend, f"https://{target}"))
            await refused(register, "FAILED_PRECONDITION", "PEER_SECURITY")


async def test_a_scheduler_does_not_start_with_a_run_whose_target_it_may_no_longer_call(tmp_path: Path) -> None:
    """A list that was made narrower would count for new runs alone."""
    async with world(data_dir=tmp_path) as w:
        await w.open()
    settings = SchedulerSettings(listen=["127.0.0.1:0"], data_dir=tmp_path, allow_peer=["buffer:50051"])
    with pytest.raises(StartError, match="no allow_peer names it"):
        await build(settings).start()
