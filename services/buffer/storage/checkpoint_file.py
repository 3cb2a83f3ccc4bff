"""The file of a checkpoint: parts of an image, framed and checksummed.

Invariants: a file has its name only once it is whole and the disk has confirmed it; what a crash leaves behind has the
suffix `.part` and counts for nothing. Every byte is covered by a checksum.

Form: magic; then per part u32 length, u32 CRC32C of its bytes, the bytes (a `Part` of storage.proto), the last of which
says what the checkpoint is; then the tail: u64 offset of that last frame, u64 number of frames, u32 CRC32C over the
checksums of all frames, u32 CRC32C of the tail before it. Integers big-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import google_crc32c

from services.runtime.errors import TurnoutError, data_loss, failed_precondition
from turnout.buffer.storage.v1 import storage_pb2 as st

_NAME: Final = b"TNCKPT"
FORMAT: Final = 2
"""Raised whenever a program of the former number could misread a file."""

_MAGIC: Final = b"%s%02d" % (_NAME, FORMAT)
_FRAME: Final = struct.Struct(">II")
_TAIL: Final = struct.Struct(">QQI")
_CRC: Final = struct.Struct(">I")
_TAIL_BYTES: Final = _TAIL.size + _CRC.size

PART_SUFFIX: Final = ".part"

SYNC_BYTES: Final = 8 << 20
"""Written between two syncs: one sync of everything at the end would hold up the syncs of commits meanwhile."""


class CheckpointWriter:
    """Writes one checkpoint; used by one thread at a time. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._part = path.with_suffix(PART_SUFFIX)
        self._file: BinaryIO = self._part.open("wb")
        self._file.write(_MAGIC)
        self._offset = len(_MAGIC)
        self._last = 0
        self._frames = 0
        self._crc = 0
        self._unsynced = 0

    def write(self, lot: list[bytes]) -> None:
        """Add parts."""
        for data in lot:
            crc: int = google_crc32c.value(data)
            self._last = self._offset
            self._file.write(_FRAME.pack(len(data), crc))
            self._file.write(data)
            self._offset += _FRAME.size + len(data)
            self._frames += 1
            self._crc = google_crc32c.extend(self._crc, _CRC.pack(crc))
            self._unsynced += _FRAME.size + len(data)
            if self._unsynced >= SYNC_BYTES:
                self._sync()

    def finish(self) -> None:
        """Make the file durable under its name; the last part was written."""
        tail = _TAIL.pack(self._last, self._frames, self._crc)
        self._file.write(tail + _CRC.pack(google_crc32c.value(tail)))
        self._sync()
        self._file.close()
        self._part.rename(self._path)
        for directory in (self._path.parent, self._path.parent.parent):
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def discard(self) -> None:
        """Remove what was written, unless it was finished."""
        try:
            self._file.close()
        except OSError:
            pass  # A full disk also refuses the bytes still buffered; they are not wanted.
        finally:
            self._part.unlink(missing_ok=True)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced = 0


def read_end(path: Path) -> st.CheckpointEnd:
    """What a checkpoint says of itself.

    Raises DATA_LOSS / CHECKPOINT_DAMAGED, FAILED_PRECONDITION / CHECKPOINT_FORMAT, OSError.
    """
    with path.open("rb") as file:
        _check_format(file)
        last, _, _ = _read_tail(file)
        file.seek(last)
        return _end_of(_read_frame(file)[0])


def read_parts(path: Path) -> Iterator[st.Part]:
    """Every part, the last one included, verified on the way.

    Raises DATA_LOSS / CHECKPOINT_DAMAGED, FAILED_PRECONDITION / CHECKPOINT_FORMAT, OSError.
    """
    with path.open("rb") as file:
        _check_format(file)
        last, frames, expected = _read_tail(file)
        file.seek(0)
        if file.read(len(_MAGIC)) != _MAGIC:
            raise damaged("it has a wrong head")
        chain = 0
        part = st.Part()
        for _ in range(frames):
            if file.tell() > last:
                raise damaged("it has more frames than it says")
            part, crc = _read_frame(file)
            chain = google_crc32c.extend(chain, _CRC.pack(crc))
            yield part
        if chain != expected or file.tell() != _tail_offset(file):
            raise damaged("its frames are not those that were written")
        _end_of(part)


def _check_format(file: BinaryIO) -> None:
    """Before all else: where the end of a file of another format is, is unknown."""
    head = file.read(len(_MAGIC))
    name, number = head[: len(_NAME)], head[len(_NAME) :]
    if name == _NAME and number.isdigit() and int(number) != FORMAT:
        age = "an older" if int(number) < FORMAT else "a newer"
        message = (
            f"the checkpoint has format {int(number)}, and this release reads {FORMAT}: {age} release wrote it; "
            "docs/operations.md says how to go on"
        )
        raise failed_precondition(
            "CHECKPOINT_FORMAT", message, field="checkpoint_id", found=int(number), supported=FORMAT
        )


def _tail_offset(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size - _TAIL_BYTES


def _read_tail(file: BinaryIO) -> tuple[int, int, int]:
    offset = _tail_offset(file)
    if offset < len(_MAGIC):
        raise damaged("it ends early")
    file.seek(offset)
    data = file.read(_TAIL_BYTES)
    tail, crc = data[: _TAIL.size], data[_TAIL.size :]
    if _CRC.unpack(crc)[0] != google_crc32c.value(tail):
        raise damaged("its end has a wrong checksum")
    last, frames, chain = _TAIL.unpack(tail)
    return last, frames, chain


def _read_frame(file: BinaryIO) -> tuple[st.Part, int]:
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        raise damaged("it ends early")
    length, crc = _FRAME.unpack(head)
    if length > _tail_offset(file):
        raise damaged("a frame is longer than the file")
    data = file.read(length)
    if len(data) != length or google_crc32c.value(data) != crc:
        raise damaged("a frame has a wrong checksum")
    return st.Part.FromString(data), crc


def _end_of(part: st.Part) -> st.CheckpointEnd:
    if part.WhichOneof("part") != "checkpoint":
        raise damaged("its last frame does not say what it is")
    return part.checkpoint


def damaged(detail: str) -> TurnoutError:
    """The file is not what was written."""
    return data_loss("CHECKPOINT_DAMAGED", f"the checkpoint is damaged: {detail}", field="checkpoint_id", detail=detail)
