"""Writer: appends parts to the newest segment and makes them durable.

Invariants: parts are written in the order in which they were handed in, many at a time, on one thread; `_settled` is
the number of a part up to which all are written, refused or dropped; syncs run on another thread, so that bytes flow
while the disk confirms earlier ones. A segment that reached its size is closed. While the disk refuses (`failure`),
patient parts wait and are tried again, all others are refused; what was refused left nothing behind. After a failed
sync nothing is accepted any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from services.buffer.segments.failures import closed, sync_failed, write_failed
from services.buffer.segments.options import MIB, SegmentOptions
from services.buffer.segments.part import Part
from services.buffer.segments.record import pack
from services.buffer.segments.segment import Segment
from services.runtime.errors import Code, TurnoutError, describe, internal
from services.runtime.journal import Durability
from services.runtime.journal.ballast import Ballast

_BATCH_BYTES: Final = 4 * MIB
"""Written in one go: a few milliseconds of work, so that a small part does not wait long."""

_BATCH_PARTS: Final = 500
"""Parts written in one go: entering them takes the event loop a few microseconds each."""

_JOIN_BYTES: Final = 16 << 10
"""Data up to this size is copied together with its neighbours, since a buffer more in a system call costs more."""

_GATHER_S: Final = 0.02
"""For how long patient parts are gathered while nobody waits for them: each write costs two changes of thread, and the
journal has their bytes already."""

_GATHER_BYTES: Final = MIB
"""Bytes in flight at which gathering ends early."""

_SYNC_AHEAD_BYTES: Final = 8 * MIB
"""Unsynced bytes at which a sync begins though nobody waits: the disk works while more arrives."""

_RETRY_S: Final = 1.0
"""Between two tries while the disk is full."""

_ENOUGH_BYTES: Final = 8 * MIB
"""Free space at which a disk counts as full no longer."""


class Writer:
    """Writes parts. All methods are called on the event loop."""

    def __init__(
        self,
        directory: Path,
        options: SegmentOptions,
        new_segment: Callable[[], Segment],
        on_closed: Callable[[Segment], None],
        on_fatal: Callable[[TurnoutError], None],
    ) -> None:
        """`on_closed` is told of each segment to which nothing will be added any more."""
        self._directory = directory
        self._options = options
        self._new_segment = new_segment
        self._on_closed = on_closed
        self._on_fatal = on_fatal
        self._ballast = Ballast(directory / "ballast", options.ballast_bytes)
        self._gave_back = False
        self._fsync = options.durability is Durability.FSYNC
        self._loop = asyncio.get_running_loop()
        self._append_thread = ThreadPoolExecutor(1, "payload-append")
        self._sync_thread = ThreadPoolExecutor(1, "payload-sync")
        self._queue: deque[Part] = deque()
        self._added = self._settled = self._synced = 0
        self._unsynced_bytes = 0
        self._unsynced: list[Segment] = []
        self._sync_wanted = asyncio.Event()
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._kick = asyncio.Event()
        self._moved: asyncio.Future[None] = self._loop.create_future()
        self._new_names = False
        self._busy = self._retire = self._syncing = self._broken = False
        self.current: Segment | None = None
        self.failure: TurnoutError | None = None
        """Why bytes are refused, while they are."""
        self.in_flight = 0
        """Bytes handed in and not settled."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, current: Segment | None) -> None:
        """Begin, with `current` to be appended to, if there is one. Raises OSError."""
        if current is not None:
            await self._loop.run_in_executor(self._append_thread, current.open)
            self.current = current
        await self._loop.run_in_executor(self._append_thread, self._ballast.take)
        self._tasks = [self._loop.create_task(self._guard(work())) for work in (self._append_all, self._sync_all)]

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as error:
            # A fault of this program must not leave everybody waiting.
            self._break(internal("PAYLOAD_FAULT", "the payload store failed", detail=describe(error)))

    def _break(self, error: TurnoutError) -> None:
        self.failure = error
        self._broken = True
        self._tell()
        self._on_fatal(error)

    # ------------------------------------------------------------------------------------------------------- handing in

    def add(self, part: Part) -> None:
        """Write a part as soon as may be."""
        self._queue.append(part)
        self._added += 1
        part.number = self._added
        self.in_flight += part.header.size
        self._wake.set()
        if not part.patient or self.in_flight >= _GATHER_BYTES:
            self._hurry.set()

    def check(self) -> None:
        """Raise what bytes are refused with, if they are."""
        if self.failure is not None:
            error = self.failure
            raise TurnoutError(error.code, error.reason, error.message, error.metadata)

    async def room(self, limit: int = sys.maxsize) -> None:
        """Wait until less is in flight than the bound, and than `limit`. Raises what bytes are refused with."""
        self.check()
        limit = min(limit, self._options.in_flight_bytes)
        while self.in_flight > limit:
            await self._progress()
            self.check()

    async def written(self) -> None:
        """Wait until all that was handed in so far is in its file. Raises what bytes are refused with."""
        mark = self._added
        while self._settled < mark:
            self._hurry.set()
            self.check()
            await self._progress()
        self.check()

    async def synced(self) -> None:
        """Wait until the disk has confirmed all that was handed in so far. Raises what bytes are refused with."""
        mark = self._added
        await self.written()
        while self._synced < mark:
            self._sync_wanted.set()
            await self._progress()
            self.check()

    async def durable(self) -> None:
        """Wait until all that was handed in so far is as durable as was asked for."""
        await (self.synced() if self._fsync else self.written())

    def retire(self) -> None:
        """Close the newest segment, since nothing in it lives; once it is no longer being written."""
        if self._busy:
            self._retire = True
        elif self.current is not None:
            self._close_current()

    def kick(self) -> None:
        """Space was freed: what waits for it may try again."""
        self._kick.set()

    async def close(self) -> None:
        """Write what can be written, sync it if syncing was asked for, and let go of the files."""
        with contextlib.suppress(TurnoutError):
            await self.durable()
        self.failure = self.failure or closed()
        self._tell()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for thread in (self._append_thread, self._sync_thread):
            await self._loop.run_in_executor(None, thread.shutdown)
        for segment in {*self._unsynced, *([self.current] if self.current else [])}:
            segment.close()

    def _progress(self) -> asyncio.Future[None]:
        """Done at the next part settled, sync done, or failure."""
        return asyncio.shield(self._moved)

    def _tell(self) -> None:
        self._moved.set_result(None)
        self._moved = self._loop.create_future()

    # -------------------------------------------------------------------------------------------------------- appending

    async def _append_all(self) -> None:
        while True:
            if self._retire and self.current is not None and not self.current.live:
                self._close_current()
            self._retire = False
            if self._queue:
                await self._gather()
            batch = self._take()
            if not batch:
                self._advance()
                if self.failure is None:
                    await self._wake.wait()
                else:
                    await self._pause()
                    await self._look_for_space()
                continue
            self._busy = True
            try:
                segment = self._newest()
                begin, end = await self._loop.run_in_executor(self._append_thread, self._append, segment, batch)
            except OSError as error:
                await self._refuse(batch, write_failed(error))
            else:
                self._accept(segment, begin, end, batch)
                if self.failure is not None:
                    await self._look_for_space()
            finally:
                self._busy = False

    async def _gather(self) -> None:
        """Let more parts come, unless somebody waits or a whole batch is there."""
        if self.in_flight < _GATHER_BYTES and not self._hurry.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await self._hurry.wait()
        self._hurry.clear()

    def _newest(self) -> Segment:
        if self.current is None:
            self.current = self._new_segment()
            self._new_names = True
        return self.current

    def _take(self) -> list[Part]:
        """The next parts to write, no more than the newest segment takes; dropped ones are passed over."""
        room = self._options.segment_bytes - (self.current.size if self.current else 0)
        limit = min(_BATCH_BYTES, room)
        batch: list[Part] = []
        size = 0
        while self._queue and size < limit and len(batch) < _BATCH_PARTS:
            part = self._queue.popleft()
            if part.dropped:
                self.in_flight -= part.header.size
                continue
            batch.append(part)
            size += part.header.size
        if not self._queue:
            self._wake.clear()
        return batch

    @staticmethod
    def _append(segment: Segment, batch: list[Part]) -> tuple[int, int]:
        """Write a batch; on the thread. Returns where it begins and ends."""
        segment.open()
        buffers: list[bytes] = []
        small: list[bytes] = []
        for part in batch:
            small.append(pack(part.header))
            if part.header.size <= _JOIN_BYTES:
                small += part.chunks
            else:
                buffers.append(b"".join(small))
                buffers += part.chunks
                small = []
        if small:
            buffers.append(b"".join(small))
        return segment.size, segment.append(buffers)

    def _accept(self, segment: Segment, offset: int, end: int, batch: list[Part]) -> None:
        segment.size = end
        if segment not in self._unsynced:
            self._unsynced.append(segment)
        self._unsynced_bytes += end - offset
        for part in batch:
            record = part.header.record_bytes
            segment.live += record
            self.in_flight -= part.header.size
            part.owner.written(part, segment, offset)
            offset += record
        if end >= self._options.segment_bytes:
            self._close_current()
        if self._fsync and self._unsynced_bytes >= _SYNC_AHEAD_BYTES:
            self._sync_wanted.set()
        self._advance()

    def _advance(self) -> None:
        """Count how far all is settled, and tell those who wait; not while a batch is being written.

        What was passed over or refused behind a part that still waits does not count: who waits for that part, waits.
        """
        self._settled = self._queue[0].number - 1 if self._queue else self._added
        self._tell()

    def _close_current(self) -> None:
        segment = self.current
        assert segment is not None
        self.current = None
        segment.closed = True
        if not self._fsync and not self._syncing:
            # A later sync opens it again if it has to; with fsync it stays open, to be told of failed writes.
            segment.close()
        self._on_closed(segment)

    async def _refuse(self, batch: list[Part], error: TurnoutError) -> None:
        self.failure = self.failure or error
        patient = [part for part in batch if part.patient]
        self._queue.extendleft(reversed(patient))
        for part in batch:
            if not part.patient:
                self.in_flight -= part.header.size
                part.owner.refused(part, error)
        self._advance()
        if error.code is Code.RESOURCE_EXHAUSTED and await self._aside(self._ballast.give_back):
            self._gave_back = True
        elif patient:
            await self._pause()
            await self._look_for_space()

    async def _pause(self) -> None:
        self._kick.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_S):
                await self._kick.wait()

    async def _look_for_space(self) -> None:
        """Accept again if the disk has room, apart from the reserve."""
        if not self._broken and await self._aside(self._has_space):
            self.failure = None
            self._gave_back = False
            self._tell()

    def _has_space(self) -> bool:
        disk = os.statvfs(self._directory)
        free = disk.f_bavail * disk.f_frsize
        if free < max(_ENOUGH_BYTES, 2 * self._options.ballast_bytes if self._gave_back else 0):
            return False
        self._ballast.take()
        return True

    async def _aside(self, run: Callable[[], bool]) -> bool:
        try:
            return await self._loop.run_in_executor(self._append_thread, run)
        except OSError:
            return False

    # ---------------------------------------------------------------------------------------------------------- syncing

    async def _sync_all(self) -> None:
        while True:
            await self._sync_wanted.wait()
            self._sync_wanted.clear()
            mark, segments, names = self._settled, self._unsynced, self._new_names
            self._unsynced, self._unsynced_bytes, self._new_names = [], 0, False
            self._syncing = True
            try:
                await self._loop.run_in_executor(self._sync_thread, self._sync, segments, names)
            except OSError as error:
                self._break(sync_failed(error))
                return
            self._syncing = False
            for segment in segments:
                if segment.closed and segment not in self._unsynced:
                    segment.close()
            self._synced = mark
            self._tell()

    def _sync(self, segments: list[Segment], names: bool) -> None:
        for segment in segments:
            segment.sync()
        if names:
            descriptor = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
