"""H55: proxy variables must not send calls to this machine through a proxy, and are named where they interfere."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.fakes import fake, free_port

PROXY = "http://127.0.0.1:9"
"""Nobody listens there."""

CALL = """
import asyncio, sys
from turnout.buffer.v1 import buffer_pb2
from turnout.client import *

request = buffer_pb2.GetRunRequest(run_id="r1")
options = ClientOptions(timeouts=Timeouts(call=float(sys.argv[3])), retry=RetryPolicy(max_attempts=1))

async def asynchronously():
    async with AsyncBufferClient(sys.argv[2], options) as client:
        await client.calls.GetRun(request)

try:
    if sys.argv[1] == "asyncio":
        asyncio.run(asynchronously())
    else:
        with BufferClient(sys.argv[2], options) as client:
            client.calls.GetRun(request)
except TurnoutError as error:
    print(error)
else:
    print("answered")
"""


def call(kind: str, target: str, environ: dict[str, str], timeout: float = 10) -> str:
    """Call in a process of its own: gRPC reads the variables once."""
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", CALL, kind, target, str(timeout)],
        env=clean | environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    return done.stdout.strip()


@pytest.fixture
def port() -> Iterator[int]:
    with fake("buffer") as service:
        yield int(service.target.rpartition(":")[2])


@pytest.mark.parametrize(
    ("kind", "host", "variable"),
    [
        ("asyncio", "127.0.0.1", "http_proxy"),
        ("blocking", "127.0.0.1", "grpc_proxy"),
        ("asyncio", "localhost", "https_proxy"),
        ("blocking", "localhost", "http_proxy"),
        ("blocking", "ipv4:127.0.0.1", "http_proxy"),
    ],
)
def test_h55_loopback_works_whatever_the_variables_say(port: int, host: str, variable: str, kind: str) -> None:
    """Every cluster image sets http_proxy; the first demo on such a machine would fail with UNAVAILABLE."""
    assert call(kind, f"{host}:{port}", {variable: PROXY}) == "answered"


def test_h55_a_unix_socket_works_too() -> None:
    """The path of a socket is not a host name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "buffer.sock"
        server = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys, grpc\nfrom concurrent.futures import ThreadPoolExecutor\n"
                "from turnout.buffer.v1 import buffer_pb2, buffer_pb2_grpc\n"
                "class Buffer(buffer_pb2_grpc.ReplayBufferServicer):\n"
                "    def GetRun(self, request, context): return buffer_pb2.GetRunResponse()\n"
                "server = grpc.server(ThreadPoolExecutor(1))\n"
                "buffer_pb2_grpc.add_ReplayBufferServicer_to_server(Buffer(), server)\n"
                f"server.add_insecure_port('unix:{path}'); server.start(); print('up', flush=True); sys.stdin.read()\n",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with server:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            assert call("blocking", f"unix:{path}", {"http_proxy": PROXY}) == "answered"
            assert server.stdin is not None
            server.stdin.close()


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
def test_h55_ipv6_loopback_is_not_sent_to_the_proxy() -> None:
    """Nobody listens on the port, so the error must be of the port and not of the proxy."""
    port = free_port()
    answer = call("blocking", f"[::1]:{port}", {"http_proxy": PROXY})
    assert answer.startswith("UNAVAILABLE")
    assert f":{port}" in answer
    assert "http_proxy" not in answer


def test_h55_elsewhere_the_error_names_the_variable() -> None:
    """'failed to connect to 127.0.0.1:9' tells nobody that it is the proxy of the environment."""
    answer = call("blocking", "192.0.2.1:50051", {"http_proxy": PROXY})
    assert answer.startswith("UNAVAILABLE")
    assert "the environment variable http_proxy sends 192.0.2.1:50051 through a proxy" in answer
    assert "no_proxy" in answer


def test_h55_no_proxy_is_respected() -> None:
    """The way out that the error names has to work: the proxy is no longer tried and no longer named."""
    answer = call("blocking", "192.0.2.1:50051", {"http_proxy": PROXY, "no_proxy": "192.0.2.1"}, timeout=1)
    assert "http_proxy" not in answer
    assert "127.0.0.1:9" not in answer
