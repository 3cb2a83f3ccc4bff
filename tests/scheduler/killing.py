"""Kills a scheduler at its k-th await point, in process: everything it was doing stops there for good, what it had not
handed to its journal is lost, and another one starts on its directory.

Await points are those at which something outside hears of the scheduler or is heard: before and after each call to a
peer (after: the peer did it, the reply is lost), each message of a wait, before and after the journal is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from services.scheduler.buffer_peer import BufferPeer
from services.scheduler.engine_peer import EnginePeer
from services.scheduler.hosted import HostedRun
from services.scheduler.storage.book import Book
from services.scheduler.storage.keeper import Keeper
from tests.scheduler.world import World

T = TypeVar("T")

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Points:
    """Counts await points from `arm` on, and kills at number `kill_at` (from 1; 0: never)."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.passed: list[str] = []
        self.armed = False
        self.dead = False
        self.killed = asyncio.Event()
        self.recovered = asyncio.Event()
        self.recovered.set()

    async def point(self, name: str) -> None:
        """One await point."""
        if self.armed:
            self.passed.append(name)
            if len(self.passed) == self.kill_at:
                self.dead = True
                self.recovered.clear()
                self.killed.set()
        if self.dead:
            await asyncio.get_running_loop().create_future()


def install(points: Points, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the points where a scheduler of this process awaits."""

    def around(owner: type[Any], method: str) -> None:
        original = getattr(owner, method)

        async def hooked(self: Any, *args: Any) -> Any:
            name = f"{owner.__name__}.{args[0]._method.decode()}" if hasattr(args[0], "_method") else owner.__name__
            try:
                await points.point(f"before {name}")
            except BaseException:
                args[0].cancel()
                raise
            result = await original(self, *args)
            await points.point(f"after {name}")
            return result

        monkeypatch.setattr(owner, method, hooked)

    around(BufferPeer, "_call")
    around(EnginePeer, "_call")
    wait, durable, write = BufferPeer.wait, Keeper.durable, Keeper._write

    async def hooked_wait(self: BufferPeer, *args: Any) -> AsyncIterator[Any]:
        await points.point("before a wait")
        async with aclosing(wait(self, *args)) as messages:
            async for message in messages:
                await points.point(f"a wait's {message.WhichOneof('event')}")
                yield message

    async def hooked_durable(self: Keeper, hosted: HostedRun) -> None:
        await points.point("before the journal")
        await durable(self, hosted)
        await points.point("after the journal")

    def hooked_write(self: Keeper, book: Book) -> None:
        if not points.dead:
            write(self, book)

    monkeypatch.setattr(BufferPeer, "wait", hooked_wait)
    monkeypatch.setattr(Keeper, "durable", hooked_durable)
    monkeypatch.setattr(Keeper, "_write", hooked_write)


@asynccontextmanager
async def reviving(w: World, points: Points) -> AsyncIterator[None]:
    """Start the scheduler again whenever it was killed."""

    async def revive() -> None:
        while True:
            await points.killed.wait()
            points.killed.clear()
            target = w.host.target
            await w.host.stop(0)
            points.dead = False
            assert w.start is not None
            w.host = await w.start(target)
            points.recovered.set()

    task = asyncio.ensure_future(revive())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def persistently(points: Points, call: Callable[[], Awaitable[T]]) -> T:
    """What a trainer does with a call: it repeats it until it is answered."""
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() not in _AWAY:
                raise
        await points.recovered.wait()
        await asyncio.sleep(0.005)
