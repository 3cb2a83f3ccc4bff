"""The journal on disk, as the event loop sees it.

Invariants: nothing here waits for a disk on the loop: commits happen on the writer's thread, reads and everything rare
on two more. The exception is a small commit in durability `os`, which is a copy into memory of the kernel: it happens
on the loop, since handing it to another thread and back takes ten times as long, while the thread has nothing to do, no
checkpoint is in the way, and the last such copy was quick. A parcel is committed or handed to the writer at the end of
the turn in which its first record came, so callers that run in one turn share a commit even when the disk is idle.
Whoever waits is told exactly once, in order, and after the first failure is told that failure.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection
from concurrent.futures import Future, wait
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from services.runtime.durations import Durations
from services.runtime.errors import TurnoutError, failed_precondition, out_of_range
from services.runtime.journal.at_once import AtOnce
from services.runtime.journal.ballast import Ballast
from services.runtime.journal.batch import (
    PARCEL_BYTES,
    Record,
    pack_length,
    require_payload,
    stream_prefix,
)
from services.runtime.journal.database import Database
from services.runtime.journal.durable import Durable, Parcel
from services.runtime.journal.failures import (
    FSYNC_REASON,
    Cause,
    JournalFailure,
    cause_of,
    closed,
    failure_of,
    not_failed,
)
from services.runtime.journal.files import JournalFiles
from services.runtime.journal.journal import COMMIT_BOUNDS_S, JournalState, JournalStats
from services.runtime.journal.lock import DirectoryLock
from services.runtime.journal.opening import Opened, Seams, open_database
from services.runtime.journal.options import Durability, JournalOptions
from services.runtime.journal.snapshot import SnapshotReader, SnapshotWriter
from services.runtime.journal.spool import read_batches, read_chunks, write_chunks
from services.runtime.journal.threads import Threads
from services.runtime.journal.writer import Job, Writer

WAL_BOUND: Final = 4
"""Times `checkpoint_bytes` at which commits wait for the checkpoint: without syncs of its own (durability `os`) the
writer can be faster than the disk for as long as memory lasts."""

_PREFIXES: Final = 10_000
"""Streams whose encoded names are kept at hand: far more than there are runs at a time."""

R = TypeVar("R")


class SqliteJournal:
    """A Journal in a directory of its own. Made by `open`."""

    def __init__(
        self, files: JournalFiles, schema: str, options: JournalOptions, seams: Seams, lock: DirectoryLock
    ) -> None:
        self._files = files
        self._schema = schema
        self._options = options
        self._seams = seams
        self._lock = lock
        self._ballast = Ballast(files.ballast, options.ballast_bytes)
        self._threads = Threads(f"{schema} journal")
        self._loop = asyncio.get_running_loop()
        self._prefixes: dict[str, bytes] = {}
        self._snapshotting = False
        self._state = JournalState.CLOSED
        self._failure: JournalFailure | None = None
        self._opened: Opened | None = None

    @classmethod
    async def open(cls, directory: Path, *, schema: str, options: JournalOptions, seams: Seams) -> SqliteJournal:
        """Open the journal in `directory`, or make it. See `open_journal` for the errors."""
        files = JournalFiles(directory)
        try:
            lock = DirectoryLock(files.lock)
        except OSError as error:
            raise failure_of(error).error from error
        journal = cls(files, schema, options, seams, lock)
        try:
            journal._begin(await journal._threads.aside(journal._load))
        except asyncio.CancelledError:
            journal._threads.submit(journal._give_up)  # behind the opening, which goes on
            raise
        except BaseException:
            lock.release()
            raise
        finally:
            if journal._state is not JournalState.OPEN:
                journal._threads.shut()
        return journal

    def _load(self) -> Opened:
        """Open the files; on the thread for that, which the closing of what was open before also needs."""
        self._unload(checkpoint=False)
        self._opened = open_database(self._files, self._options, self._schema, self._ballast, self._seams)
        return self._opened

    def _unload(self, *, checkpoint: bool) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.database.close(checkpoint=checkpoint)

    def _give_up(self) -> None:
        self._unload(checkpoint=False)
        self._lock.release()

    def _begin(self, opened: Opened) -> None:
        self._database, self.lost = opened
        self._position = self._durable_position = self._database.position
        self._records = self._committed_bytes = 0
        self._commit_times = Durations(COMMIT_BOUNDS_S)
        self._parcel: Parcel | None = None
        self._last = Parcel()
        self._last.settle()
        self._checkpointing: Future[None] | None = None
        self._at_once = AtOnce()
        self._state = JournalState.OPEN
        self._failure = None
        self._stopped: asyncio.Future[JournalFailure] = self._loop.create_future()
        name = f"{self._schema} journal writer"
        self._writer = Writer(self._database.append, self, self._after_work, name)

    @property
    def id(self) -> str:
        return self._database.meta.journal_id.hex()

    @property
    def incarnation(self) -> int:
        return self._database.meta.incarnation

    @property
    def state(self) -> JournalState:
        return self._state

    @property
    def failure(self) -> JournalFailure | None:
        return self._failure

    @property
    def position(self) -> int:
        return self._position

    @property
    def durable_position(self) -> int:
        return self._durable_position

    @property
    def snapshot_position(self) -> int:
        return self._database.meta.snapshot_position

    @property
    def compaction_due(self) -> bool:
        return self._database.log_bytes >= max(self._options.compact_bytes, self._database.snapshot_bytes // 2)

    @property
    def short_of_space(self) -> bool:
        return self._ballast.given_back

    @property
    def stats(self) -> JournalStats:
        return JournalStats(
            records=self._records,
            commits=self._commit_times.count,
            pending_records=self._position - self._durable_position,
            log_bytes=self._database.log_bytes,
            wal_bytes=self._database.wal_bytes,
            committed_bytes=self._committed_bytes,
            commit_times=self._commit_times,
        )

    def append(self, stream: str, payload: bytes) -> Durable:
        if self._state is not JournalState.OPEN:
            raise self._refusal()
        prefix = self._prefixes.get(stream) or self._prefix(stream)
        require_payload(payload)
        parcel = self._parcel
        if parcel is None or parcel.size + len(payload) > PARCEL_BYTES:
            parcel = self._new_parcel()
        length = pack_length(len(payload))
        parcel.parts += (prefix, length, payload)
        parcel.size += len(prefix) + len(length) + len(payload)
        parcel.count += 1
        self._position += 1
        return Durable(self._position, parcel)

    def tail(self) -> Durable:
        return Durable(self._position, self._parcel or self._last)

    async def replay(self, after: int | None = None, streams: Collection[str] | None = None) -> AsyncIterator[Record]:
        database = self._database
        until = self._durable_position
        if after is None:
            after = database.meta.snapshot_position
        slices = read_batches(self._threads, database, self._files, after, until, lambda: self._database is database)
        async with aclosing(slices):
            async for batches in slices:
                for batch in batches:
                    for record in batch.records():
                        if after < record.position <= until and (streams is None or record.stream in streams):
                            yield record

    async def read_snapshot(self) -> AsyncIterator[bytes]:
        meta = self._database.meta
        if not meta.snapshot_position:
            return
        # Opened at once, on the loop: a newer snapshot may remove the file in the next turn.
        reader = SnapshotReader(self._files, meta.journal_id, meta.snapshot_position, meta.snapshot_crc)
        async with aclosing(read_chunks(self._threads, reader)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def snapshot(self, position: int, chunks: AsyncIterable[bytes]) -> None:
        if self._state is not JournalState.OPEN:
            raise self._refusal()
        if self._snapshotting:
            raise failed_precondition("SNAPSHOT_RUNNING", "another snapshot is being written")
        if not self.snapshot_position < position <= self._position:
            message = f"a snapshot stands for more than {self.snapshot_position} and at most {self._position} records"
            raise out_of_range("SNAPSHOT_POSITION", message, field="position", value=position)
        self._snapshotting = True
        try:
            await self._write_snapshot(self._database, position, chunks)
        finally:
            self._snapshotting = False

    async def failed(self) -> JournalFailure:
        return await asyncio.shield(self._stopped)

    async def reopen(self) -> None:
        if self._state is not JournalState.FAILED:
            raise not_failed(self._state.name)
        await self._writer.stop()
        try:
            self._begin(await self._threads.aside(self._load))
        except TurnoutError as error:
            if error.reason == FSYNC_REASON:
                self._state = JournalState.FATAL
            raise

    async def give_back_ballast(self) -> bool:
        return await self._threads.aside(self._ballast.give_back)

    async def take_ballast(self) -> bool:
        return await self._threads.aside(self._ballast.take)

    async def close(self) -> None:
        if self._state is JournalState.CLOSED:
            return
        self._hand_over()
        in_order = self._state is JournalState.OPEN
        self._state = JournalState.CLOSED
        await self._writer.stop()
        try:
            await self._threads.aside(lambda: self._unload(checkpoint=in_order and self._failure is None))
        except sqlite3.Error as error:
            # Everything is durable in the WAL; the next opening copies it.
            self._failure = self._failure or failure_of(error)
        finally:
            self._threads.shut()
            self._lock.release()
            self._stop(self._failure or JournalFailure(closed(), fatal=False))

    def committed(self, parcels: list[Parcel], seconds: float) -> None:
        """Tell those who wait; called by the writer."""
        error = self._failure.error if self._failure else None
        if error is None:
            count = sum(parcel.count for parcel in parcels)
            self._durable_position += count
            self._records += count
            self._committed_bytes += sum(parcel.size for parcel in parcels)
            self._commit_times.add(seconds)
        for parcel in parcels:
            parcel.settle(error)

    def broke(self, parcels: list[Parcel], job: Job | None, failure: JournalFailure) -> None:
        """Accept nothing more, and tell all who wait; called by the writer and after a failed checkpoint."""
        if self._failure is None or failure.fatal:
            self._failure = failure
        if self._state is not JournalState.CLOSED:
            self._state = JournalState.FATAL if self._failure.fatal else JournalState.FAILED
        if self._parcel is not None:
            self._hand_over()
        for item in [*parcels, *([job] if job else []), *self._writer.withdraw()]:
            if isinstance(item, Parcel):
                item.settle(self._failure.error)
            else:
                item.fail(self._failure.error)
        self._last = Parcel()
        self._last.settle(self._failure.error)
        self._stop(self._failure)

    def _stop(self, failure: JournalFailure) -> None:
        if not self._stopped.done():
            self._stopped.set_result(failure)

    def _refusal(self) -> TurnoutError:
        error = self._failure.error if self._failure else closed()
        return TurnoutError(error.code, error.reason, error.message, error.metadata)

    def _prefix(self, stream: str) -> bytes:
        if len(self._prefixes) >= _PREFIXES:
            self._prefixes.clear()
        prefix = self._prefixes[stream] = stream_prefix(stream)
        return prefix

    def _new_parcel(self) -> Parcel:
        self._hand_over()
        self._loop.call_soon(self._end_of_turn)
        self._parcel = Parcel()
        return self._parcel

    def _end_of_turn(self) -> None:
        parcel = self._parcel
        if parcel is None or not self._may_commit_here(parcel):
            self._hand_over()
            return
        self._last, self._parcel = parcel, None
        begun = time.perf_counter()
        try:
            stored = self._at_once.run(lambda: self._database.append_at_once(parcel.count, parcel.body()))
        except Exception as error:
            self.broke([parcel], None, failure_of(error))
            return
        if not stored:
            self._writer.hand_in(parcel)
            return
        self.committed([parcel], time.perf_counter() - begun)

    def _may_commit_here(self, parcel: Parcel) -> bool:
        return (
            self._options.durability is Durability.OS
            and self._writer.idle
            and self._database.wal_bytes < self._options.checkpoint_bytes
            and self._at_once.may(parcel.size)
        )

    def _hand_over(self) -> None:
        if self._parcel is not None:
            self._writer.hand_in(self._parcel)
            self._last, self._parcel = self._parcel, None

    def _call(self, run: Callable[[], R]) -> asyncio.Future[R]:
        """Run something on the writer's thread, after all that was handed in."""
        if self._state is not JournalState.OPEN:
            raise self._refusal()
        return self._writer.call(run)

    async def _write_snapshot(self, database: Database, position: int, chunks: AsyncIterable[bytes]) -> None:
        journal_id = database.meta.journal_id
        writer = await self._threads.aside(lambda: SnapshotWriter(self._files, journal_id, position))
        try:
            crc = await write_chunks(self._threads, writer, chunks)
            registered = self._call(lambda: database.begin_with_snapshot(position, crc))
        except asyncio.CancelledError:
            self._threads.submit(writer.discard)  # behind what the thread still writes
            raise
        except BaseException:
            await self._threads.aside(writer.discard)
            raise
        # From here on the database may name the file, so even a cancelled caller leaves it: the next opening removes
        # what is not named.
        await registered
        while await self._call(database.delete_slice):
            pass
        await self._threads.aside(lambda: self._checkpoint(database.remove_old_snapshots))

    def _after_work(self) -> None:
        """Start a checkpoint if the WAL is long, and wait for it if it is too long; on the writer's thread."""
        length, limit = self._database.wal_bytes, self._options.checkpoint_bytes
        if length < limit:
            return
        if self._checkpointing is None or self._checkpointing.done():
            self._checkpointing = self._threads.submit(partial(self._checkpoint, self._database.checkpoint))
        if length >= WAL_BOUND * limit:
            wait([self._checkpointing])

    def _checkpoint(self, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception as error:
            # A full disk leaves the WAL as it is: commits go on while it has room, and ask again.
            if cause_of(error) is not Cause.DISK_FULL:
                self._loop.call_soon_threadsafe(self.broke, [], None, failure_of(error))
