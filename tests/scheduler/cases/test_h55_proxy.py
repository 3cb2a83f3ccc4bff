"""H55: a proxy in the environment stays out of the way between services on one machine."""

from pathlib import Path

import pytest

from services.runtime.errors import Code
from services.runtime.peers import peer_options
from tests.scheduler.fakes import host_buffer, host_engine
from tests.scheduler.world import error_of, world

DIRECT = ("grpc.enable_http_proxy", 0)


@pytest.fixture(autouse=True)
def _proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


async def test_h55_peers_on_this_machine_are_reached_directly() -> None:
    """A cluster's proxy would answer for the buffer that listens next door, with UNAVAILABLE."""
    async with world() as w:
        opened = await w.open(buffer_target=w.buffer_host.target.replace("127.0.0.1", "localhost"))
        assert opened.epoch == 1


async def test_h55_unix_sockets_are_reached_directly(tmp_path: Path) -> None:
    """A socket has no host a proxy could know."""
    async with world() as w:
        w.buffer.runs["run"].epoch = 4
        async with (
            host_buffer(w.buffer, listen=f"unix:{tmp_path}/b.sock") as buffer,
            host_engine(w.engine, listen=f"unix:{tmp_path}/e.sock") as engine,
        ):
            assert (await w.open(buffer_target=buffer.target, engine_target=engine.target)).epoch == 5


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:5", True),
        ("127.8.9.1:5", True),
        ("localhost:5", True),
        ("[::1]:5", True),
        ("ipv4:127.0.0.1:5", True),
        ("dns:///localhost:5", True),
        ("unix:/tmp/x", True),
        ("unix-abstract:x", True),
        ("node-7:5", False),
        ("10.0.0.1:5", False),
        ("dns:///node-7:5", False),
    ],
)
def test_h55_the_proxy_is_left_out_for_this_machine_alone(target: str, local: bool) -> None:
    """Other machines may only be reachable through it."""
    assert (DIRECT in peer_options(target)) == local


async def test_h55_a_peer_behind_a_broken_proxy_is_named_with_the_variable_that_sends_it_there() -> None:
    """ "UNAVAILABLE" from a proxy that nobody remembers costs an afternoon."""
    async with world(peer_timeout_s=2.0) as w:
        error = await error_of(w.open(buffer_target="node-7.invalid:50051"))
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "BUFFER_UNREACHABLE")
        assert "proxy" in error.message
        assert error.metadata["proxy_variable"] in ("grpc_proxy", "https_proxy", "http_proxy")
