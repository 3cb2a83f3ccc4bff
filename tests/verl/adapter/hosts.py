"""Services in a thread of their own, for callers that block theirs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

from services.buffer import service as buffer_service
from services.buffer.settings import BufferSettings
from services.runtime.host import ServiceHost

LISTEN = ["127.0.0.1:0"]
SCALE = 0.001
"""Wall seconds per domain second: what the buffer spaces by tenths of a second is spaced by 0.1 ms."""


@contextlib.contextmanager
def in_thread(*builds: Callable[[], AbstractAsyncContextManager[ServiceHost]]) -> Iterator[list[ServiceHost]]:
    """Services for the length of a block, in one event loop: gRPC does not like several in a process."""
    hosts: list[ServiceHost] = []
    began, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            hosts.extend([await stack.enter_async_context(build()) for build in builds])
            began.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            began.set()
            loop.close()

    thread = threading.Thread(target=run, name="services")
    thread.start()
    began.wait()
    try:
        yield hosts
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join()


@contextlib.contextmanager
def buffer_host() -> Iterator[ServiceHost]:
    """A replay buffer."""
    with in_thread(lambda: buffer_service.build(BufferSettings(listen=LISTEN, time_scale=SCALE))) as (host,):
        yield host
