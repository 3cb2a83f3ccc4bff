"""Reading a segment from end to end by its headers.

Invariants: the data of records is skipped, unless `verify` asks for it; after damage the scan goes on at the next
header that is right, so that damage costs only the records that it hit. What follows the last right record is torn or
was never written, and does not belong to the segment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.buffer.segments.record import FILE_MAGIC, MAX_HEAD_BYTES, RECORD_MAGIC, Header, unpack

WINDOW_BYTES: Final = 1 << 20
"""Read at a time."""

_JUMP_BYTES: Final = 16 << 10
"""Read after a jump over large data, where the next header will be followed by such data again."""


@dataclass(slots=True)
class Scan:
    """What a scan met beside the records; complete once it has ended."""

    end: int = 0
    """End of the last right record, or of the file's own header; 0 if not even that is right."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Stretches without a right record in front of one: (offset, bytes)."""
    bad: list[tuple[str, int]] = field(default_factory=list)
    """Records whose data is not what was written, if that was verified: (payload id, offset)."""


def records(path: Path, scan: Scan, *, verify: bool = False) -> Iterator[tuple[Header, int]]:
    """Yield the records of a segment with their offsets. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        base, window = 0, os.pread(descriptor, WINDOW_BYTES, 0)
        at = len(FILE_MAGIC)
        if window.startswith(FILE_MAGIC):
            scan.end = at
        gap: int | None = None
        while at < size:
            if at < base or at + MAX_HEAD_BYTES > base + len(window) < size:
                jumped = at > base + len(window)
                base, window = at, os.pread(descriptor, _JUMP_BYTES if jumped else WINDOW_BYTES, at)
            header = unpack(window, at - base)
            if header is None or at + header.record_bytes > size:
                gap = at if gap is None else gap
                at = _next_magic(descriptor, at + 1, size)
                continue
            if gap is not None:
                scan.gaps.append((gap, at - gap))
                gap = None
            scan.end = at + header.record_bytes
            if verify and not header.check(os.pread(descriptor, header.size, scan.end - header.size)):
                scan.bad.append((header.payload_id, at))
            else:
                yield header, at
            at = scan.end
    finally:
        os.close(descriptor)


def _next_magic(descriptor: int, at: int, size: int) -> int:
    """Where the next magic number is, from `at` on; `size` if there is none."""
    while at < size:
        window = os.pread(descriptor, WINDOW_BYTES, at)
        found = window.find(RECORD_MAGIC)
        if found >= 0:
            return at + found
        if len(window) < len(RECORD_MAGIC):
            break
        # The magic number may lie across the end of the window.
        at += len(window) - len(RECORD_MAGIC) + 1
    return size
