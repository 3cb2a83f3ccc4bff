"""What the tests of the segments share."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google_crc32c import value

from services.buffer.segments import SegmentOptions, SegmentStore
from services.buffer.segments.segment import Segment
from services.runtime.errors import TurnoutError

KIB = 1 << 10
MIB = 1 << 20


def small(**changes: Any) -> SegmentOptions:
    """Options under which a few hundred kilobytes show everything."""
    return SegmentOptions(**{"segment_bytes": 64 * KIB, "memory_bytes": 0, "ballast_bytes": 0, **changes})


async def nothing_to_wait_for() -> None:
    """Every decision is durable already."""


def no_fatal(error: TurnoutError) -> None:
    raise AssertionError(f"fatal: {error}")


@asynccontextmanager
async def opened(
    directory: Path, options: SegmentOptions | None = None, *, keep: Sequence[str] | None = (), **hooks: Any
) -> AsyncIterator[SegmentStore]:
    """An open store that holds what is named in `keep`; None leaves that to the test."""
    hooks = {"settled": nothing_to_wait_for, "on_fatal": no_fatal, **hooks}
    store = await SegmentStore.open(directory, options or small(), **hooks)
    try:
        if keep is not None:
            store.retain(keep)
        yield store
    finally:
        await store.close()


def data_of(number: int, size: int) -> bytes:
    """Bytes that differ from payload to payload and from place to place."""
    return b"".join(f"{number}:{at:08d};".encode() for at in range(0, size, 8))[:size]


def put(store: SegmentStore, payload_id: str, data: bytes) -> None:
    store.put(payload_id, data, value(data))


async def upload(store: SegmentStore, payload_id: str, data: bytes, chunk: int = 300 * KIB) -> None:
    taking = store.upload(payload_id)
    try:
        for at in range(0, len(data), chunk):
            await taking.write(data[at : at + chunk])
        await taking.finish()
    finally:
        taking.abort()


async def read_all(store: SegmentStore, payload_id: str, size: int, *, start: int = 0, step: int = MIB) -> bytes:
    data = b""
    while start + len(data) < size:
        piece = await store.read(payload_id, start + len(data), step)
        assert 0 < len(piece) <= step
        data += piece
    return data


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*"))


class SmallDisk:
    """Lets all segments together grow to `limit` bytes, then tells what a full disk tells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, limit: int) -> None:
        self.limit = limit
        self._directory = directory
        write, statvfs = Segment._write, os.statvfs
        disk = self

        def limited(segment: Segment, buffers: Sequence[bytes], at: int) -> int:
            wanted = sum(map(len, buffers))
            free = disk.free
            if wanted > free:
                # Like a real one: what fits is written before the error comes.
                if free > 0:
                    write(segment, [b"".join(buffers)[:free]], at)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(segment, buffers, at)

        def measured(path: Any) -> os.statvfs_result:
            found = list(statvfs(path))
            found[1], found[4] = 1, max(0, disk.free)
            return os.statvfs_result(found)

        monkeypatch.setattr(Segment, "_write", limited)
        monkeypatch.setattr(os, "statvfs", measured)

    @property
    def free(self) -> int:
        return self.limit - sum(path.stat().st_size for path in self._directory.iterdir())
