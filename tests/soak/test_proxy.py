"""The proxy does what its faults are called."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.soak.proxy import ChaosProxy, Fault

MESSAGE = bytes(range(256)) * 64


class OneFault(random.Random):
    """Chooses the same fault always."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(1)
        self._fault = fault

    def choices(self, *_: object, **__: object) -> list[Fault]:  # type: ignore[override]
        return [self._fault]


@asynccontextmanager
async def through(fault: Fault) -> AsyncIterator[tuple[ChaosProxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection through a proxy to a service that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    service = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with service, ChaosProxy(OneFault(fault)) as proxy:
        host, port = service.sockets[0].getsockname()[:2]
        proxy.upstream = f"{host}:{port}"
        reader, writer = await asyncio.open_connection(*proxy.target.split(":"))
        writer.write(MESSAGE)
        assert await reader.readexactly(len(MESSAGE)) == MESSAGE
        try:
            yield proxy, reader, writer
        finally:
            writer.close()


async def test_a_reset_ends_the_connection_at_once() -> None:
    async with through(Fault.RESET) as (proxy, reader, _):
        proxy.tear()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_a_silent_drop_tells_nobody() -> None:
    """Neither an end nor an answer: only a keepalive finds it."""
    async with through(Fault.DROP) as (proxy, reader, writer):
        proxy.tear()
        writer.write(MESSAGE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2)


async def test_a_delay_ends_by_itself() -> None:
    async with through(Fault.DELAY) as (proxy, reader, writer):
        proxy.tear()
        writer.write(MESSAGE)
        assert await asyncio.wait_for(reader.readexactly(len(MESSAGE)), 10) == MESSAGE


async def test_a_cut_lets_a_part_of_a_frame_through() -> None:
    """The other side has to cope with half a message."""
    async with through(Fault.CUT) as (proxy, reader, writer):
        proxy.tear()
        writer.write(MESSAGE)
        received = b""
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            received = await reader.readexactly(len(MESSAGE))
        assert len(received) < len(MESSAGE)
