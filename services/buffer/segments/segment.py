"""Segment: one file of records, and what is known of it.

Invariants: `size` is the end of the last whole record; `live` counts the bytes of records that are still needed. A
closed segment is only read, and removed once nothing in it lives and nobody reads it. Methods that touch the file block
and are called off the event loop; each read opens the file for itself, so that thousands of segments need no
descriptors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.buffer.segments.record import FILE_MAGIC, HEADER_BYTES, MAX_HEAD_BYTES, Header, unpack

_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)
"""Linux alone can read what is in memory and nothing else."""

_IOV_MAX: Final = 1000
"""Buffers per system call; the system allows 1024."""


class Segment:
    """One file. `directory` holds `segment-<number>`."""

    __slots__ = ("closed", "compacted", "descriptor", "live", "number", "path", "pins", "size")

    def __init__(self, directory: Path, number: int, size: int = 0) -> None:
        self.number = number
        self.path = directory / f"segment-{number:08d}"
        self.size = size
        self.live = 0
        self.pins = 0
        self.closed = False
        # What lived in it when it was last copied together; while no less does, it cannot be helped.
        self.compacted = sys.maxsize
        self.descriptor: int | None = None

    def open(self) -> None:
        """Open it for appending, making it if it is new."""
        if self.descriptor is None:
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            if not self.size:
                try:
                    self._write([FILE_MAGIC], 0)
                except OSError:
                    # Open, it would be taken for one that has its beginning.
                    self.close()
                    raise
                self.size = len(FILE_MAGIC)

    def append(self, buffers: Sequence[bytes]) -> int:
        """Write records behind the last; returns the new size, for the caller to set. After an error nothing is added.

        Raises OSError.
        """
        end = self.size
        try:
            for first in range(0, len(buffers), _IOV_MAX):
                end = self._write(buffers[first : first + _IOV_MAX], end)
        except OSError:
            self._cut()
            raise
        return end

    def _write(self, buffers: Sequence[bytes], at: int) -> int:
        assert self.descriptor is not None
        total = sum(map(len, buffers))
        written = os.pwritev(self.descriptor, buffers, at)
        if written < total:
            # Rare: the disk is nearly full. The rest goes, or tells why not.
            rest = memoryview(b"".join(buffers))
            while written < total:
                written += os.pwrite(self.descriptor, rest[written:], at + written)
        return at + total

    def _cut(self) -> None:
        assert self.descriptor is not None
        os.ftruncate(self.descriptor, self.size)

    def sync(self) -> None:
        """Make what was written durable. Raises OSError."""
        if self.descriptor is not None:
            os.fdatasync(self.descriptor)
            return
        try:
            descriptor = os.open(self.path, os.O_WRONLY)
        except FileNotFoundError:
            return  # It was removed: nothing in it is needed.
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of the file."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def read_cached(
        self, offset: int, id_bytes: int, size: int, scratch: bytearray
    ) -> tuple[Header | None, bytes] | None:
        """What `read` returns, of a record whose id has `id_bytes`, if the page cache has all of it; else None.

        Does not wait for a disk, so it may be called on the event loop. `scratch` has room for the record.
        """
        if _NOWAIT is None:
            return None
        head = HEADER_BYTES + id_bytes
        whole = memoryview(scratch)[: head + size]
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                read = os.preadv(descriptor, [whole], offset, _NOWAIT)
            finally:
                os.close(descriptor)
        except OSError:
            # Not there yet, or not asked for in this way: the other way of reading tells what is wrong.
            return None
        if read < len(whole):
            return None
        header = unpack(bytes(whole[:head]), 0)
        if header is None or header.size != size:
            return None, b""
        return header, bytes(whole[head:])

    def read(self, offset: int, size: int) -> tuple[Header | None, bytes]:
        """The header at `offset` and, if it is right, its `size` bytes of data. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            window = os.pread(descriptor, MAX_HEAD_BYTES, offset)
            header = unpack(window, 0)
            if header is None or header.size != size:
                return None, b""
            at = header.record_bytes - size
            if at + size <= len(window):
                return header, window[at : at + size]
            return header, os.pread(descriptor, size, offset + at)
        finally:
            os.close(descriptor)
