"""New weights on their way from the trainer to several replicas.

Invariants: chunks are shared, not copied; a slow replica holds up the others only once it is `BUFFERED_CHUNKS`
behind; a replica whose move has failed holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import google_crc32c

from services.engine.deadline import Deadline
from services.runtime.errors import TurnoutError, aborted, data_loss, invalid_argument

BUFFERED_CHUNKS: Final = 256
"""Chunks kept for a replica that is slower than the trainer: 256 MiB of the usual ones, which all replicas share."""


@dataclass(slots=True)
class Feed:
    """Chunks on their way to one replica; an error or None ends them."""

    queue: asyncio.Queue[bytes | TurnoutError | None] = field(
        default_factory=lambda: asyncio.Queue(maxsize=BUFFERED_CHUNKS)
    )
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def put(self, item: bytes | TurnoutError | None) -> None:
        """Hand on, unless the replica has failed meanwhile."""
        if not self.queue.full():
            self.queue.put_nowait(item)
            return
        waits = [asyncio.ensure_future(self.queue.put(item)), asyncio.ensure_future(self.closed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def chunks(self, first: Callable[[], Awaitable[None]], deadline: Deadline) -> AsyncIterator[bytes]:
        """The chunks as they come; `first` is awaited before the first one."""
        begun = False
        while (item := await self.queue.get()) is not None:
            if isinstance(item, TurnoutError):
                raise item
            if not begun:
                await first()
                begun = True
            deadline.restart()
            yield item
        deadline.restart()


async def hand_out(frames: AsyncIterator[bytes | int], size: int, feeds: list[Feed]) -> TurnoutError | None:
    """Give every chunk to every replica; returns what is wrong with the whole, the CRC32C at its end included."""
    crc, moved = 0, 0
    async for frame in frames:
        if isinstance(frame, int):
            if moved != size:
                return invalid_argument("size", f"{moved} bytes came, {size} were announced", value=size)
            if frame != crc:
                return data_loss("CRC_MISMATCH", "the weights were damaged on their way", value=frame, current=crc)
            return None
        moved += len(frame)
        crc = google_crc32c.extend(crc, frame)
        for feed in feeds:
            await feed.put(frame)
    return aborted("WEIGHTS_INCOMPLETE", "the stream ended before its last frame")
