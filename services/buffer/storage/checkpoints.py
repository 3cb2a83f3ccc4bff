"""Checkpoints: images of single runs in the data directory.

Invariants: a checkpoint is one file of its own, payload bytes included, so nothing else can take a part of it away; it
is complete or it is not there; it outlives its run, until it is deleted. Saves and restores of a run never overlap.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.buffer.storage.checkpoint_file import PART_SUFFIX, CheckpointWriter, read_end, read_parts
from services.runtime.errors import TurnoutError, describe, internal, not_found, resource_exhausted
from services.runtime.logs import get_logger
from turnout.buffer.storage.v1 import storage_pb2 as st

_SUFFIX = ".ckpt"
# Handed to or from the thread at once.
LOT_BYTES = 1 << 20
_log = get_logger("buffer")

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one data directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def lock(self, run_id: str) -> asyncio.Lock:
        """Held while a run is saved or restored."""
        return self._locks[run_id]

    async def sweep(self) -> None:
        """Remove what a crash left unfinished."""

        def sweep() -> None:
            for stray in self._directory.glob(f"*/*{PART_SUFFIX}"):
                stray.unlink(missing_ok=True)

        await _in_thread(sweep)

    def _path(self, run_id: str, checkpoint_id: str) -> Path:
        """Ids may be longer than names of files, and hold what those may not."""
        return self._directory / _digest(run_id) / f"{_digest(checkpoint_id)}{_SUFFIX}"

    async def find(self, run_id: str, checkpoint_id: str) -> st.CheckpointEnd | None:
        """What a checkpoint says of itself, None if there is none.

        Raises DATA_LOSS / CHECKPOINT_DAMAGED, FAILED_PRECONDITION / CHECKPOINT_FORMAT.
        """
        try:
            return await _in_thread(partial(read_end, self._path(run_id, checkpoint_id)))
        except FileNotFoundError:
            return None
        except TurnoutError as error:
            raise _named(error, checkpoint_id) from error

    async def require(self, run_id: str, checkpoint_id: str) -> st.CheckpointEnd:
        """The same. Raises NOT_FOUND / CHECKPOINT_NOT_FOUND, DATA_LOSS / CHECKPOINT_DAMAGED."""
        found = await self.find(run_id, checkpoint_id)
        if found is None:
            raise _missing(checkpoint_id)
        return found

    async def list(self, run_id: str) -> list[st.CheckpointEnd]:
        """The complete checkpoints of a run, newest first; damaged ones are logged."""

        def read() -> Iterator[st.CheckpointEnd]:
            for path in (self._directory / _digest(run_id)).glob(f"*{_SUFFIX}"):
                try:
                    yield read_end(path)
                except TurnoutError as error:
                    _log.error("a checkpoint cannot be read", file=path.name, error=str(error))

        found = await _in_thread(lambda: list(read()))
        return sorted(found, key=lambda end: end.info.created_at.ToNanoseconds(), reverse=True)

    async def delete(self, run_id: str, checkpoint_id: str) -> None:
        """Remove a checkpoint. Raises NOT_FOUND / CHECKPOINT_NOT_FOUND."""
        try:
            await _in_thread(self._path(run_id, checkpoint_id).unlink)
        except FileNotFoundError:
            raise _missing(checkpoint_id) from None

    @asynccontextmanager
    async def writing(self, run_id: str, checkpoint_id: str) -> AsyncIterator[CheckpointSink]:
        """Write a checkpoint; it is there once `finish` of the sink has returned, and not at all otherwise."""
        sink = CheckpointSink(self._path(run_id, checkpoint_id))
        try:
            yield sink
        finally:
            sink.close()

    async def parts(self, run_id: str, checkpoint_id: str) -> AsyncIterator[st.Part]:
        """Every part of a checkpoint, verified. Raises NOT_FOUND, DATA_LOSS / CHECKPOINT_DAMAGED."""
        parts = read_parts(self._path(run_id, checkpoint_id))
        try:
            while lot := await _in_thread(lambda: _take(parts)):
                for part in lot:
                    yield part
        except FileNotFoundError:
            raise _missing(checkpoint_id) from None
        except TurnoutError as error:
            raise _named(error, checkpoint_id) from error


class CheckpointSink:
    """A checkpoint that is being written, on a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._path = path
        self._writer: CheckpointWriter | None = None
        self._lot: list[bytes] = []
        self._size = 0

    async def write(self, part: st.Part) -> None:
        """Add a part. Raises RESOURCE_EXHAUSTED / DISK_FULL, INTERNAL / CHECKPOINT_IO."""
        data = part.SerializeToString()
        self._lot.append(data)
        self._size += len(data)
        if self._size >= LOT_BYTES:
            await self._flush()

    async def finish(self) -> None:
        """Make it durable and visible."""
        await self._flush()
        await self._run(self._finish)

    async def _flush(self) -> None:
        lot, self._lot, self._size = self._lot, [], 0
        await self._run(lambda: self._open().write(lot))

    def _open(self) -> CheckpointWriter:
        if self._writer is None:
            self._writer = CheckpointWriter(self._path)
        return self._writer

    def _finish(self) -> None:
        self._open().finish()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise _io_error(error) from error

    def close(self) -> None:
        """Remove what is not finished, behind what the thread still does."""

        def discard() -> None:
            if self._writer is not None:
                self._writer.discard()

        self._thread.submit(discard)
        self._thread.shutdown(wait=False)


def _take(parts: Iterator[st.Part]) -> list[st.Part]:
    lot: list[st.Part] = []
    size = 0
    for part in parts:
        lot.append(part)
        size += part.ByteSize()
        if size >= LOT_BYTES:
            break
    return lot


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _io_error(error) from error


def _io_error(error: OSError) -> TurnoutError:
    _log.error("checkpoint: the disk refused", error=describe(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return resource_exhausted("DISK_FULL", "the disk of the checkpoints is full")
    return internal("CHECKPOINT_IO", "the checkpoint could not be read or written")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _missing(checkpoint_id: str) -> TurnoutError:
    message = "no such checkpoint"
    return not_found("CHECKPOINT_NOT_FOUND", message, field="checkpoint_id", value=checkpoint_id)


def _named(error: TurnoutError, checkpoint_id: str) -> TurnoutError:
    if error.reason not in ("CHECKPOINT_DAMAGED", "CHECKPOINT_FORMAT"):
        return error
    return TurnoutError(error.code, error.reason, error.message, {**error.metadata, "value": checkpoint_id})
