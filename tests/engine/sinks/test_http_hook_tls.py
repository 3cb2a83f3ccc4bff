"""A route hook over TLS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.engine.service import build
from services.engine.settings import EngineSettings
from services.engine.sinks.base import Membership
from services.engine.sinks.http_hook import HttpHook
from services.runtime.errors import Code, TurnoutError
from services.runtime.host import StartError
from services.runtime.tls import ServerTls
from tests.runtime.certificates import Authority

NOTHING = Membership("run", "i", 1, 0, (), ())


@asynccontextmanager
async def router(authority: Authority, taken: list[str]) -> AsyncIterator[str]:
    """A router that asks for a certificate; yields its URL."""
    cert, key = authority.issue("router", "127.0.0.1")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        taken.append(json.loads(await reader.readexactly(length))["run_id"])
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    context = ServerTls(cert, key, authority.ca).context()
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/routes"


async def test_a_router_behind_mutual_tls_is_told_the_routes(tmp_path: Path) -> None:
    """A hook that trusts the public authorities alone cannot reach a router of the cluster, nor say who it is."""
    ours, strangers = Authority(tmp_path / "ours"), Authority(tmp_path / "strangers")
    taken: list[str] = []
    async with router(ours, taken) as url:
        for authority, served in ((ours, True), (strangers, False)):
            cert, key = authority.issue("controller", "controller")
            settings = EngineSettings(peer_ca=str(authority.ca), peer_cert=cert, peer_key=key)
            hook = HttpHook(url, False, settings.peer_context())
            if served:
                await hook.push(NOTHING)
            else:
                with pytest.raises(TurnoutError) as caught:
                    await hook.push(NOTHING)
                assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "SINK_UNREACHABLE")
            await hook.close()
    assert taken == ["run"]


async def test_files_that_cannot_be_used_stop_the_start(tmp_path: Path) -> None:
    """The first push would fail instead, when replicas are being lent."""
    settings = EngineSettings(
        listen=["127.0.0.1:0"], route_hook=["https://127.0.0.1:1/"], peer_ca=str(tmp_path / "none.pem")
    )
    with pytest.raises(StartError, match="peer_ca"):
        await build(settings).start()
