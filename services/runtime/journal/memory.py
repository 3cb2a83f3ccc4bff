"""The journal of durability `none`: it keeps nothing.

Invariants: every record is done at once and gone at once; a restart begins empty, with another id.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Collection
from typing import Final

from services.runtime.journal.batch import Record, require_payload, stream_prefix
from services.runtime.journal.durable import Durable, Parcel
from services.runtime.journal.failures import JournalFailure, closed, not_failed
from services.runtime.journal.journal import JournalState, JournalStats


def _settled() -> Parcel:
    parcel = Parcel()
    parcel.settle()
    return parcel


_SETTLED: Final = _settled()


class MemoryJournal:
    """A Journal without files."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self.incarnation = 1
        self.position = 0
        self.snapshot_position = 0
        self.failure: JournalFailure | None = None
        self.compaction_due = False
        self.short_of_space = False
        self.lost = 0
        self._closed = asyncio.Event()

    @property
    def state(self) -> JournalState:
        return JournalState.CLOSED if self._closed.is_set() else JournalState.OPEN

    @property
    def durable_position(self) -> int:
        return self.position

    @property
    def stats(self) -> JournalStats:
        return JournalStats(records=self.position)

    def append(self, stream: str, payload: bytes) -> Durable:
        if self._closed.is_set():
            raise closed()
        stream_prefix(stream)
        require_payload(payload)
        self.position += 1
        return Durable(self.position, _SETTLED)

    def tail(self) -> Durable:
        return Durable(self.position, _SETTLED)

    async def replay(self, after: int | None = None, streams: Collection[str] | None = None) -> AsyncIterator[Record]:
        return
        yield

    async def read_snapshot(self) -> AsyncIterator[bytes]:
        return
        yield

    async def snapshot(self, position: int, chunks: AsyncIterable[bytes]) -> None:
        return

    async def failed(self) -> JournalFailure:
        await self._closed.wait()
        return JournalFailure(closed(), fatal=False)

    async def reopen(self) -> None:
        raise not_failed(self.state.name)

    async def give_back_ballast(self) -> bool:
        return False

    async def take_ballast(self) -> bool:
        return False

    async def close(self) -> None:
        self._closed.set()
