"""Tidying: removes segments in which nothing lives, and copies together what lives in mostly dead ones.

Invariants: a segment is removed only when nothing in it lives, nobody reads it, every decision that made it so is
durable, and the disk has confirmed the copies of what lived in it. Copying goes in slices between which everything else
gets its turn; what cannot be read back is left where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from typing import Final

from services.buffer.segments.options import MIB, SegmentOptions
from services.buffer.segments.part import Part
from services.buffer.segments.places import Places, offset_of, place_of, size_of
from services.buffer.segments.record import Header
from services.buffer.segments.scan import Scan, records
from services.buffer.segments.segment import Segment
from services.buffer.segments.writer import Writer
from services.runtime.errors import TurnoutError, describe
from services.runtime.logs import get_logger

_SLICE_RECORDS: Final = 500
"""Headers looked at in one turn: below a millisecond."""

_SLICE_BYTES: Final = 4 * MIB
"""Copied before the writer is waited for."""

_RETIRE_BYTES: Final = MIB
"""A newest segment in which nothing lives is closed, and so removed, from this size on."""


class Tidying:
    """Keeps the segments few. All methods are called on the event loop."""

    def __init__(
        self,
        segments: dict[int, Segment],
        places: Places,
        writer: Writer,
        options: SegmentOptions,
        settled: Callable[[], Awaitable[object]],
    ) -> None:
        self._log = get_logger("buffer")
        self._segments = segments
        self._places = places
        self._writer = writer
        self._compact_below = options.compact_below
        self._settled = settled
        self._wake = asyncio.Event()
        self._copied = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; before it nothing is removed."""
        self._task = asyncio.create_task(self._run())
        self._wake.set()

    async def close(self) -> None:
        """Stop; what is left to do is done after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def consider(self, segment: Segment) -> None:
        """Something in a segment died, or it was closed, or a reader left it."""
        if self._dead(segment) or self._sparse(segment) or (segment is self._writer.current and not segment.live):
            self._wake.set()

    @staticmethod
    def _dead(segment: Segment) -> bool:
        return segment.closed and not segment.live and not segment.pins

    def _sparse(self, segment: Segment) -> bool:
        return (
            segment.closed
            and 0 < segment.live < self._compact_below * segment.size
            and segment.compacted > segment.live
        )

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._tidy()
            except TurnoutError as error:
                # The disk is full, or the journal has failed. What frees space, or the next start, leads here again.
                self._log.warning("payload segments stay for now", reason=error.reason, detail=error.message)
            except OSError as error:
                self._log.error("payload segments cannot be tidied", detail=describe(error))

    async def _tidy(self) -> None:
        current = self._writer.current
        if current is not None and not current.live and current.size >= _RETIRE_BYTES:
            self._writer.retire()
        await self._remove_dead()
        sparse = min(filter(self._sparse, self._segments.values()), key=lambda segment: segment.live, default=None)
        if sparse is not None:
            await self._compact(sparse)
            self._wake.set()

    async def _remove_dead(self) -> None:
        dead = [segment for segment in self._segments.values() if self._dead(segment)]
        if not dead:
            return
        await self._settled()
        if self._copied:
            await self._writer.synced()
            self._copied = False
        # Nothing in a closed segment comes to life again, but a reader may have come meanwhile.
        dead = [segment for segment in dead if self._dead(segment)]
        for segment in dead:
            del self._segments[segment.number]
        await asyncio.to_thread(_unlink, dead)
        self._writer.kick()

    async def _compact(self, segment: Segment) -> None:
        # Until less lives than now there is no point in trying again, should something be left.
        segment.compacted = segment.live
        self._copied = True
        segment.pins += 1
        try:
            found = records(segment.path, Scan())
            while batch := await asyncio.to_thread(_next, found):
                size = 0
                for header, offset in batch:
                    place = place_of(segment.number, offset, header.size)
                    if not self._places.is_at(header.payload_id, header.start, place):
                        continue
                    _, data = await asyncio.to_thread(segment.read, offset_of(place), size_of(place))
                    if not header.check(data):
                        self._log.error("payload is damaged", payload_id=header.payload_id, segment=segment.path.name)
                        continue
                    self._writer.add(Part(header, (data,), _Move(self, segment, place)))
                    size += header.size
                    if size >= _SLICE_BYTES:
                        await self._writer.written()
                        size = 0
            await self._writer.written()
        finally:
            segment.pins -= 1

    def moved(self, header: Header, source: Segment, old: int, target: Segment, offset: int) -> None:
        """A copy is written; it replaces the old one, unless the payload was deleted meanwhile."""
        if self._places.is_at(header.payload_id, header.start, old):
            self._places.move(header.payload_id, header.start, place_of(target.number, offset, header.size))
            source.live -= header.record_bytes
        else:
            target.live -= header.record_bytes


class _Move:
    """Owner of one copied part."""

    __slots__ = ("_place", "_source", "_tidying")

    def __init__(self, tidying: Tidying, source: Segment, place: int) -> None:
        self._tidying = tidying
        self._source = source
        self._place = place

    def written(self, part: Part, segment: Segment, offset: int) -> None:
        self._tidying.moved(part.header, self._source, self._place, segment, offset)

    def refused(self, part: Part, error: TurnoutError) -> None:
        """The old copy stays."""


def _next(found: Iterator[tuple[Header, int]]) -> list[tuple[Header, int]]:
    return list(islice(found, _SLICE_RECORDS))


def _unlink(segments: list[Segment]) -> None:
    for segment in segments:
        with contextlib.suppress(FileNotFoundError):
            segment.path.unlink()
