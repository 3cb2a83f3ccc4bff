"""The format of a segment file.

    file    = "TNSEG\\0\\0\\1" record*
    record  = header id data
    header  = magic "TNPR" | id size u16 | flags u16 | start u64 | data size u32 | CRC before u32 | CRC after u32
              | header CRC u32                                                              (little-endian, 32 bytes)

`start` is the offset of `data` in its payload, flag 1 marks the last part of it. The CRCs are CRC32C: `CRC before` that
of the payload up to `start`, `CRC after` with `data` on top, so that the last part has the CRC of the whole payload and
bytes are run over once. The header CRC covers the header before it and the id.

Invariants: a record is never changed once it is written; a header is believed only if its CRC is right.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from google_crc32c import extend, value

FILE_MAGIC: Final = b"TNSEG\x00\x00\x01"
RECORD_MAGIC: Final = b"TNPR"
LAST: Final = 1

_FIELDS: Final = struct.Struct("<4sHHQIII")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CRC.size

MAX_ID_BYTES: Final = 512
"""As for every id."""

MAX_HEAD_BYTES: Final = HEADER_BYTES + MAX_ID_BYTES
"""What comes before the data, at most."""


@dataclass(slots=True)
class Header:
    """A record without its data. Nobody changes one; frozen it would take four times as long to make."""

    payload_id: str
    start: int
    size: int
    crc_before: int
    crc_after: int
    last: bool

    @property
    def record_bytes(self) -> int:
        """Size of the whole record."""
        return record_bytes(self.payload_id, self.size)

    def check(self, data: bytes) -> bool:
        """Whether `data` is what was written."""
        return len(data) == self.size and extend(self.crc_before, data) == self.crc_after


def record_bytes(payload_id: str, size: int) -> int:
    """Size of the record of a part with `size` bytes of data."""
    return HEADER_BYTES + (len(payload_id) if payload_id.isascii() else len(payload_id.encode())) + size


def pack(header: Header) -> bytes:
    """The bytes before the data: header and id."""
    name = header.payload_id.encode()
    fields = _FIELDS.pack(
        RECORD_MAGIC,
        len(name),
        LAST if header.last else 0,
        header.start,
        header.size,
        header.crc_before,
        header.crc_after,
    )
    return b"".join((fields, _CRC.pack(value(fields + name)), name))


def unpack(window: bytes, at: int) -> Header | None:
    """The header at `at`, or None if there is no whole and right one."""
    if len(window) - at < HEADER_BYTES:
        return None
    magic, name_size, flags, start, size, before, after = _FIELDS.unpack_from(window, at)
    if magic != RECORD_MAGIC or name_size > MAX_ID_BYTES:
        return None
    name_at = at + HEADER_BYTES
    name = window[name_at : name_at + name_size]
    (crc,) = _CRC.unpack_from(window, at + _FIELDS.size)
    if len(name) != name_size or value(window[at : at + _FIELDS.size] + name) != crc:
        return None
    return Header(name.decode(), start, size, before, after, bool(flags & LAST))
