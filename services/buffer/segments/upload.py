"""SegmentUpload: a payload that comes in pieces and becomes records of at most one part each.

Invariants: the last part is held back until the end is known, since it is marked; until `finish` has returned nothing
names the payload, and what an unfinished one left in segments is dead once it is aborted, or at the next start.
"""

from __future__ import annotations

from typing import Final, Protocol

from google_crc32c import extend

from services.buffer.segments.options import MIB, PART_BYTES
from services.buffer.segments.part import Part
from services.buffer.segments.places import place_of
from services.buffer.segments.record import Header
from services.buffer.segments.segment import Segment
from services.buffer.segments.writer import Writer
from services.runtime.errors import TurnoutError

IN_FLIGHT_BYTES: Final = 4 * MIB
"""Bytes in flight above which an upload waits, though the store would take more: the writer stays busy, and memory that
was just written is used again instead of fresh pages, which cost more than the copy into them."""


class UploadOwner(Protocol):
    """The store, as an upload sees it."""

    def adopt(self, payload_id: str, places: list[int]) -> None:
        """The payload is whole and durable."""

    def abandon(self, payload_id: str, places: list[int]) -> None:
        """These records are of no use."""


class SegmentUpload:
    """One payload on its way."""

    def __init__(self, payload_id: str, writer: Writer, store: UploadOwner) -> None:
        self._payload_id = payload_id
        self._writer = writer
        self._store = store
        self._chunks: list[bytes] = []
        self._size = 0
        self._start = 0
        self._crc_before = 0
        self.crc32c = 0
        self._places: list[int] = []
        self._parts: list[Part] = []
        self._error: TurnoutError | None = None
        self._ended = False

    async def write(self, chunk: bytes) -> None:
        """Take the next bytes, waiting while too many are in flight. Raises RESOURCE_EXHAUSTED / DISK_FULL."""
        self._check()
        if len(chunk) <= PART_BYTES:
            self._take(chunk)
        else:
            for at in range(0, len(chunk), PART_BYTES):
                self._take(chunk[at : at + PART_BYTES])
        await self._writer.room(IN_FLIGHT_BYTES)

    async def finish(self) -> None:
        """Return once every byte is durable and the payload can be read."""
        self._check()
        self._hand_in(last=True)
        await self._writer.durable()
        self._check()
        self._ended = True
        self._store.adopt(self._payload_id, self._places)

    def abort(self) -> None:
        """Forget what came; after `finish` it does nothing."""
        if self._ended:
            return
        self._ended = True
        self._chunks.clear()
        for part in self._parts:
            part.dropped = True
        self._store.abandon(self._payload_id, self._places)

    def _check(self) -> None:
        self._writer.check()
        if self._error is not None:
            raise self._error

    def _take(self, piece: bytes) -> None:
        if self._size + len(piece) > PART_BYTES:
            self._hand_in(last=False)
        self._chunks.append(piece)
        self._size += len(piece)
        self.crc32c = extend(self.crc32c, piece)

    def _hand_in(self, *, last: bool) -> None:
        header = Header(self._payload_id, self._start, self._size, self._crc_before, self.crc32c, last)
        part = Part(header, self._chunks, self)
        self._parts.append(part)
        self._start += self._size
        self._crc_before = self.crc32c
        self._chunks, self._size = [], 0
        self._writer.add(part)

    def written(self, part: Part, segment: Segment, offset: int) -> None:
        """A part is in its file; parts are written in order."""
        self._parts.remove(part)
        place = place_of(segment.number, offset, part.header.size)
        if self._ended:
            self._store.abandon(self._payload_id, [place])
        else:
            self._places.append(place)

    def refused(self, part: Part, error: TurnoutError) -> None:
        """A part was not written, so the payload cannot be whole."""
        self._parts.remove(part)
        self._error = self._error or error
