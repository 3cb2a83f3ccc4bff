"""A TCP proxy that mistreats connections.

Invariants: a connection is carried byte for byte until its fault; the faults are those that networks show: a reset, a
silent drop of everything (half-open: nobody is told), a pause, and an end in the middle of a frame. Its address stays
when the service behind it moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from enum import Enum
from types import TracebackType
from typing import Final, Self

_READ_BYTES: Final = 64 * 1024

HALF_OPEN_S: Final = 30.0
"""How long a silently dropped connection stays open: longer than any keepalive."""

_SILENT_S: Final = 3.0
"""How long a connection that finds no service is left without an answer, if it is not refused."""


class Fault(Enum):
    """What happens to a connection."""

    RESET = "reset"
    DROP = "silent drop"
    DELAY = "delay"
    CUT = "cut in a frame"


_WEIGHTS: Final = {Fault.RESET: 3, Fault.DROP: 1, Fault.DELAY: 4, Fault.CUT: 4}


class _Connection:
    """One client's connection and ours to the service."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.writers: list[asyncio.StreamWriter] = []
        self.silent = False
        self.cut = False
        self.paused = asyncio.Event()
        self.paused.set()

    def abort(self, *, reset: bool = False) -> None:
        for writer in self.writers:
            if reset and not writer.transport.is_closing():
                # Closing with a linger time of zero sends a reset.
                there = writer.transport.get_extra_info("socket")
                there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            await self.paused.wait()
            if self.silent:
                continue
            if self.cut and len(data) > 1:
                writer.write(data[: self._rng.randrange(1, len(data))])
                with contextlib.suppress(OSError):
                    await writer.drain()
                writer.close()
                self.abort()
                return
            writer.write(data)
            await writer.drain()


class ChaosProxy:
    """Carries connections to `upstream`, or refuses them while that is None."""

    def __init__(self, rng: random.Random) -> None:
        self.upstream: str | None = None
        self.faults: Counter[Fault] = Counter()
        self.connections = 0
        self.target = ""
        self._rng = rng
        self._live: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.target = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def tear(self) -> None:
        """Do something to one connection."""
        live = [connection for connection in self._live if not connection.silent and not connection.cut]
        if not live:
            return
        connection = self._rng.choice(sorted(live, key=id))
        fault = self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        self.faults[fault] += 1
        match fault:
            case Fault.RESET:
                connection.abort(reset=True)
            case Fault.DROP:
                connection.silent = True
                asyncio.get_running_loop().call_later(HALF_OPEN_S, connection.abort)
            case Fault.DELAY:
                connection.paused.clear()
                asyncio.get_running_loop().call_later(self._rng.uniform(0.1, 2.0), connection.paused.set)
            case Fault.CUT:
                connection.cut = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection(self._rng)
        connection.writers.append(writer)
        self.connections += 1
        try:
            # Cancelled means that the proxy ends; asyncio would print a traceback for each connection.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._serve(connection, reader, writer)
        finally:
            self._live.discard(connection)
            connection.abort()
            self._tasks.discard(task)

    async def _serve(self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.upstream is None:
            if self._rng.random() < 0.3:
                # Accepted, and then nothing: H57.
                await asyncio.sleep(_SILENT_S)
            return
        host, _, port = self.upstream.rpartition(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        connection.writers.append(there_writer)
        self._live.add(connection)
        ways = [
            asyncio.ensure_future(connection.carry(reader, there_writer)),
            asyncio.ensure_future(connection.carry(there_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if connection.silent:
                # One end has gone; the other is not to hear of it.
                await asyncio.sleep(HALF_OPEN_S)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
