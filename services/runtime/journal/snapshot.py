"""The file of a snapshot: what its owner wrote in place of all records up to a position.

Why a file beside the database: it is written and synced without passing through the WAL, and removing the one before it
frees its space at once.

Invariants: a snapshot counts only once the database names its position and checksum; until then its file ends in
`.part`, and what a crash leaves behind is removed at the next opening. The file is synced before it is named, in every
durability, since the batches that it replaces are deleted.

Form: magic, journal id, position; then per chunk u32 length, u32 checksum, bytes; then the length that no chunk has,
and the u64 number of chunks. A checksum is CRC32C over the one before it and the chunk; the last one, over the end, is
the one that the database keeps. Integers big-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import google_crc32c

from services.runtime.errors import TurnoutError, invalid_argument
from services.runtime.journal.failures import damaged, refuse_other_format
from services.runtime.journal.files import JournalFiles

_HEAD: Final = struct.Struct(">8s16sQ")
_CHUNK: Final = struct.Struct(">II")
_END: Final = struct.Struct(">IQ")
_MAGIC: Final = b"TNSNAP01"
_END_LENGTH: Final = 0xFFFF_FFFF

MAX_CHUNK_BYTES: Final = 64 << 20
"""Largest chunk: one is held in memory whole, on both ways."""

SYNC_BYTES: Final = 8 << 20
"""Written between two syncs: one sync of everything at the end would hold up the syncs of commits meanwhile."""


class SnapshotWriter:
    """Writes one snapshot; used by one thread at a time."""

    def __init__(self, files: JournalFiles, journal_id: bytes, position: int) -> None:
        self._files = files
        self._position = position
        self._path = files.snapshot(position)
        self._part = self._path.with_suffix(".part")
        self._file: BinaryIO = self._part.open("wb")
        head = _HEAD.pack(_MAGIC, journal_id, position)
        self._file.write(head)
        self._crc: int = google_crc32c.value(head)
        self._chunks = 0
        self._unsynced = 0

    def write(self, chunks: Iterable[bytes]) -> None:
        """Add chunks. Raises OSError."""
        for chunk in chunks:
            if len(chunk) > MAX_CHUNK_BYTES:
                message = f"a chunk of a snapshot holds at most {MAX_CHUNK_BYTES} bytes, this one has {len(chunk)}"
                raise invalid_argument("chunks", message, value=len(chunk))
            self._crc = google_crc32c.extend(self._crc, chunk)
            self._file.write(_CHUNK.pack(len(chunk), self._crc))
            self._file.write(chunk)
            self._chunks += 1
            self._unsynced += _CHUNK.size + len(chunk)
            if self._unsynced >= SYNC_BYTES:
                self._sync()

    def finish(self) -> int:
        """Make the file durable under its name; return its checksum. Raises OSError."""
        end = _END.pack(_END_LENGTH, self._chunks)
        self._file.write(end)
        self._sync()
        self._file.close()
        self._part.rename(self._path)
        self._files.sync_directory()
        crc: int = google_crc32c.extend(self._crc, end)
        return crc

    def discard(self) -> None:
        """Remove what was written."""
        try:
            self._file.close()
        except OSError:
            pass  # A full disk also refuses the bytes still buffered; they are not wanted.
        finally:
            self._part.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced = 0


class SnapshotReader:
    """Reads the chunks of one snapshot and checks them on the way; used by one thread at a time.

    The file stays readable while it is open, also when a newer snapshot takes its place.
    """

    def __init__(self, files: JournalFiles, journal_id: bytes, position: int, crc: int) -> None:
        """Open the file.

        Raises DATA_LOSS if it is missing or not the snapshot that is meant, FAILED_PRECONDITION / JOURNAL_FORMAT if it
        has another format.
        """
        self._path = files.snapshot(position)
        self._expected = crc
        try:
            self._file: BinaryIO = self._path.open("rb")
        except FileNotFoundError:
            raise self._damaged("the snapshot is missing") from None
        head = self._file.read(_HEAD.size)
        try:
            refuse_other_format("snapshot format", head[: len(_MAGIC)], _MAGIC)
        except TurnoutError:
            self._file.close()
            raise
        if head != _HEAD.pack(_MAGIC, journal_id, position):
            self._file.close()
            raise self._damaged("the snapshot has a wrong head")
        self._crc: int = google_crc32c.value(head)
        self._chunks = 0
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """Return the next chunk. Raises DATA_LOSS where the file is damaged."""
        if self._ended:
            raise StopIteration
        head = self._file.read(_CHUNK.size)
        if len(head) < _CHUNK.size:
            raise self._damaged("the snapshot ends early")
        length, crc = _CHUNK.unpack(head)
        if length == _END_LENGTH:
            end = head + self._file.read()
            if end != _END.pack(_END_LENGTH, self._chunks) or google_crc32c.extend(self._crc, end) != self._expected:
                raise self._damaged("the snapshot has a wrong end")
            self._ended = True
            raise StopIteration
        chunk = self._file.read(min(length, MAX_CHUNK_BYTES))
        self._crc = google_crc32c.extend(self._crc, chunk)
        if len(chunk) != length or self._crc != crc:
            raise self._damaged(f"chunk {self._chunks} of the snapshot has a wrong checksum")
        self._chunks += 1
        return chunk

    def take(self, size: int) -> list[bytes]:
        """Return the next chunks, at least `size` bytes of them or all that are left; [] at the end."""
        taken: list[bytes] = []
        while size > 0:
            chunk = next(self, None)
            if chunk is None:
                break
            taken.append(chunk)
            size -= max(len(chunk), 1)
        return taken

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _damaged(self, detail: str) -> Exception:
        # The records that the snapshot stands for are gone, so there is no good position before it.
        return damaged(self._path.name, detail, last_good=0)
