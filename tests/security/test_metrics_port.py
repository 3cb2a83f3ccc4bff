"""What strangers can do to the port of the metrics, which knows no tokens."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from services.runtime import metrics_server
from services.runtime.config import ServiceSettings
from services.runtime.host import ServiceHost
from services.runtime.metrics_server import PLACES
from services.runtime.open_files import WANTED, raise_open_files
from tests.runtime.certificates import Authority
from tests.runtime.helpers import probe_host


def _place(host: ServiceHost) -> tuple[str, int]:
    assert host.metrics_url is not None
    port = host.metrics_url.rpartition(":")[2].partition("/")[0]
    return "127.0.0.1", int(port)


async def _scrape(host: ServiceHost) -> str:
    def get() -> str:
        assert host.metrics_url is not None
        with urllib.request.urlopen(host.metrics_url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(get)


def _ends(connection: socket.socket) -> bool:
    """Whether the other side hangs up, with nothing said."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds are long for a test."""
    monkeypatch.setattr(metrics_server._Handler, "timeout", 1.0)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "mutual TLS"])
async def test_silent_connections_take_neither_threads_nor_files_for_long(
    tmp_path: Path, tls: bool, impatient: None
) -> None:
    """A thousand of them, each with a thread and a file for ever, ended a buffer for all its workers."""
    settings: dict[str, Any] = {"metrics_listen": "127.0.0.1:0", "grace_s": 1}
    if tls:
        authority = Authority(tmp_path)
        cert, key = authority.issue("server", "127.0.0.1")
        settings |= {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca}
    async with probe_host(settings=ServiceSettings.model_validate(settings)) as host:
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(socket.create_connection(_place(host), timeout=10)) for _ in range(PLACES)]
            for connection in held:
                connection.sendall(b"GET /metr")
            late = stack.enter_context(socket.create_connection(_place(host), timeout=10))
            assert await asyncio.to_thread(_ends, late), "a place was given to more than there are"
            ended = await asyncio.gather(*(asyncio.to_thread(_ends, connection) for connection in held))
            assert all(ended), "one that says nothing keeps its place for ever"
        if not tls:
            assert "turnout_serving 1.0" in await _scrape(host)


async def test_noise_at_the_port_neither_ends_it_nor_fills_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """A port scan wrote a traceback for each of its connections."""
    async with probe_host(settings=ServiceSettings(metrics_listen="127.0.0.1:0", grace_s=1)) as host:
        noises: tuple[bytes, ...] = (
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"\0" * 100,
            b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        )
        noises += (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", b"POST /metrics HTTP/1.1\r\n\r\n")
        for noise in noises:
            with socket.create_connection(_place(host), timeout=10) as connection:
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while await asyncio.to_thread(connection.recv, 1 << 16):
                        pass
        assert "turnout_serving 1.0" in await _scrape(host)
    assert "Traceback" not in capfd.readouterr().err


def test_a_service_takes_as_many_files_as_it_may() -> None:
    """A shell's 1024 is less than the connections that `max_connections` lets in."""
    code = (
        "import resource, services.runtime.open_files as files; "
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); files.raise_open_files(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    told = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    soft, hard = map(int, told.stdout.split())
    assert soft == (WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0], "a higher limit was taken away"
