"""SegmentStore: the payload store on disk.

Invariants: what was put can be read at once, from memory until it is in a segment; what is read was verified against
its CRC; damage costs the payload that it hit. Bytes whose deletion was decided leave the disk only after `settled`,
which returns when every decision made before it is durable, so that no crash brings back a payload without its bytes.
Nothing is removed between the opening and `retain`, while decisions are replayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from services.buffer.domain.payloads import Upload, payload_not_found
from services.buffer.segments.cache import ReadCache
from services.buffer.segments.failures import damaged
from services.buffer.segments.options import PART_BYTES, SegmentOptions
from services.buffer.segments.part import Part
from services.buffer.segments.places import offset_of, place_of, segment_of, size_of
from services.buffer.segments.record import MAX_HEAD_BYTES, Header, record_bytes
from services.buffer.segments.recovery import Recovered, recover
from services.buffer.segments.segment import Segment
from services.buffer.segments.tidying import Tidying
from services.buffer.segments.upload import SegmentUpload
from services.buffer.segments.writer import Writer
from services.runtime.errors import TurnoutError
from services.runtime.logs import get_logger

# As many reads at a time as a local disk answers without queueing; more only compete for the interpreter.
_READERS = 4


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """Figures for metrics; sizes in bytes."""

    payloads: int
    segments: int
    disk_bytes: int
    live_bytes: int
    """Of `disk_bytes`, what belongs to payloads that are kept."""
    in_flight_bytes: int
    cached_bytes: int
    full: bool
    """Whether bytes are refused now."""


class SegmentStore:
    """A PayloadStore on a local disk. Made by `open`; all methods are called on one event loop."""

    persistent = True

    def __init__(
        self,
        directory: Path,
        options: SegmentOptions,
        recovered: Recovered,
        settled: Callable[[], Awaitable[object]],
        on_fatal: Callable[[TurnoutError], None],
    ) -> None:
        self._log = get_logger("buffer")
        self._directory = directory
        self._segments = recovered.segments
        self._places = recovered.places
        self._next_number = max(self._segments, default=0) + 1
        self._pending: dict[str, Part] = {}
        self._lost: set[str] = set()
        self._cache = ReadCache(options.memory_bytes)
        # What `at_hand` reads into: memory that was just used, and no fresh pages.
        self._scratch = bytearray(MAX_HEAD_BYTES + PART_BYTES)
        self._readers = ThreadPoolExecutor(_READERS, "payload-read")
        self._writer = Writer(directory, options, self._new_segment, self._closed, on_fatal)
        self._tidying = Tidying(self._segments, self._places, self._writer, options, settled)

    @classmethod
    async def open(
        cls,
        directory: Path,
        options: SegmentOptions | None = None,
        *,
        settled: Callable[[], Awaitable[object]],
        on_fatal: Callable[[TurnoutError], None],
    ) -> SegmentStore:
        """Open the segments in `directory`, making it if it is not there; then replay, and call `retain`.

        `settled` waits until every decision made so far is durable. `on_fatal` is called once if the disk did not
        confirm bytes: the process must exit. Raises OSError.
        """
        options = options or SegmentOptions()
        recovered = await asyncio.to_thread(recover, directory, options.segment_bytes)
        store = cls(directory, options, recovered, settled, on_fatal)
        for segment, offset, size in recovered.gaps:
            store._log.error("payload segment is damaged", segment=segment, offset=offset, bytes=size)
        await store._writer.start(recovered.current)
        return store

    def retain(self, payload_ids: Iterable[str]) -> list[str]:
        """Keep exactly these, which is all that the replayed decisions name; returns those whose bytes are lost.

        Called once, before anything is served, also of a new store. Reading a lost one is DATA_LOSS.
        """
        wanted = dict.fromkeys(payload_ids)
        for payload_id in [name for name in (*self._places.ids(), *self._pending) if name not in wanted]:
            self.delete(payload_id)
        lost = [name for name in wanted if name not in self._places and name not in self._pending]
        self._lost.update(lost)
        self._places.rekey(name for name in wanted if name in self._places)
        self._tidying.start()
        return lost

    @property
    def stats(self) -> SegmentStats:
        """Figures for metrics."""
        return SegmentStats(
            payloads=len(self._places) + len(self._pending),
            segments=len(self._segments),
            disk_bytes=sum(segment.size for segment in self._segments.values()),
            live_bytes=sum(segment.live for segment in self._segments.values()),
            in_flight_bytes=self._writer.in_flight,
            cached_bytes=self._cache.size,
            full=self._writer.failure is not None,
        )

    # ---------------------------------------------------------------------------------------------------- PayloadStore

    def put(self, payload_id: str, data: bytes, crc32c: int) -> None:
        """Keep `data`; of an id that is kept already the bytes stay as they are."""
        if payload_id in self._pending or payload_id in self._places:
            return
        part = Part(Header(payload_id, 0, len(data), 0, crc32c, last=True), (data,), self, patient=True)
        self._pending[payload_id] = part
        self._writer.add(part)

    def delete(self, payload_id: str) -> None:
        """Forget the bytes of an id."""
        self._cache.discard(payload_id)
        self._lost.discard(payload_id)
        part = self._pending.pop(payload_id, None)
        if part is not None:
            part.dropped = True
        self._release(payload_id, self._places.pop(payload_id))

    def upload(self, payload_id: str) -> Upload:
        """Begin to take a payload in parts, under an id that was never used."""
        return SegmentUpload(payload_id, self._writer, self)

    async def room(self) -> None:
        """Wait until there is room for more bytes. Raises RESOURCE_EXHAUSTED / DISK_FULL."""
        await self._writer.room()

    async def read(self, payload_id: str, offset: int, size: int) -> bytes:
        """Some bytes from `offset` on. Raises NOT_FOUND / PAYLOAD_NOT_FOUND, DATA_LOSS / PAYLOAD_DAMAGED."""
        data = self._in_memory(payload_id)
        start = 0
        if data is None:
            found = self._places.find(payload_id, offset)
            if found is None:
                if payload_id in self._lost:
                    raise damaged(payload_id, "its bytes were not there at the start")
                raise payload_not_found(payload_id)
            place, start = found
            data = await self._read(payload_id, place, start)
        return _cut(data, offset - start, size)

    def at_hand(self, payload_id: str, offset: int, size: int) -> bytes | None:
        """The same from memory or the page cache, or None. Raises DATA_LOSS / PAYLOAD_DAMAGED.

        A change of thread for each megabyte costs more than the megabyte. The cost is the event loop's, so this is for
        those who give way to others after each piece.
        """
        data = self._in_memory(payload_id)
        start = 0
        if data is None:
            found = self._places.find(payload_id, offset)
            if found is None:
                return None
            place, start = found
            segment = self._segments[segment_of(place)]
            record = segment.read_cached(offset_of(place), len(payload_id.encode()), size_of(place), self._scratch)
            if record is None:
                return None
            data = _verified(segment, payload_id, start, place, *record)
        return _cut(data, offset - start, size)

    def _in_memory(self, payload_id: str) -> bytes | None:
        part = self._pending.get(payload_id)
        return b"".join(part.chunks) if part is not None else self._cache.get(payload_id)

    async def flush(self) -> None:
        """Return once the disk has confirmed all that was put, whatever the durability.

        To be awaited before the records that carried the bytes are given up. Raises RESOURCE_EXHAUSTED / DISK_FULL.
        """
        await self._writer.synced()

    async def close(self) -> None:
        """Write what can be written and let go of the files. What cannot is in the journal still."""
        await self._tidying.close()
        await self._writer.close()
        await asyncio.to_thread(self._readers.shutdown)

    # ---------------------------------------------------------------------------------------------------------- reading

    async def _read(self, payload_id: str, place: int, start: int) -> bytes:
        segment = self._segments[segment_of(place)]
        # A segment that is read is not removed.
        segment.pins += 1
        try:
            data = await asyncio.get_running_loop().run_in_executor(
                self._readers, _read_verified, segment, payload_id, start, place
            )
        finally:
            segment.pins -= 1
            self._tidying.consider(segment)
        if not start and len(data) < PART_BYTES and payload_id in self._places:
            self._cache.add(payload_id, data)
        return data

    # ---------------------------------------------------------------------------------------------------------- writing

    def written(self, part: Part, segment: Segment, offset: int) -> None:
        """What was put is in a segment."""
        header = part.header
        place = place_of(segment.number, offset, header.size)
        if self._pending.get(header.payload_id) is not part:
            # It was deleted while it was written.
            self._release(header.payload_id, [place])
            return
        del self._pending[header.payload_id]
        self._places.add(header.payload_id, [place])
        self._cache.add(header.payload_id, part.chunks[0])

    def refused(self, part: Part, error: TurnoutError) -> None:
        """Never called: what was put is patient."""
        raise AssertionError(f"{part.header.payload_id} was refused: {error}")

    def adopt(self, payload_id: str, places: list[int]) -> None:
        """An upload is whole and durable."""
        self._places.add(payload_id, places)

    def abandon(self, payload_id: str, places: list[int]) -> None:
        """The records of an upload are of no use."""
        self._release(payload_id, places)

    def _release(self, payload_id: str, places: Iterable[int]) -> None:
        for place in places:
            segment = self._segments[segment_of(place)]
            segment.live -= record_bytes(payload_id, size_of(place))
            self._tidying.consider(segment)

    def _new_segment(self) -> Segment:
        segment = Segment(self._directory, self._next_number)
        self._next_number += 1
        self._segments[segment.number] = segment
        return segment

    def _closed(self, segment: Segment) -> None:
        self._tidying.consider(segment)


def _cut(data: bytes, begin: int, size: int) -> bytes:
    return data if not begin and size >= len(data) else data[begin : begin + size]


def _read_verified(segment: Segment, payload_id: str, start: int, place: int) -> bytes:
    try:
        header, data = segment.read(offset_of(place), size_of(place))
    except OSError as error:
        raise damaged(payload_id, f"{segment.path.name} cannot be read: {error}") from error
    return _verified(segment, payload_id, start, place, header, data)


def _verified(segment: Segment, payload_id: str, start: int, place: int, header: Header | None, data: bytes) -> bytes:
    if header is None or (header.payload_id, header.start) != (payload_id, start) or not header.check(data):
        raise damaged(payload_id, f"{segment.path.name} at {offset_of(place)} does not hold what was written")
    return data
