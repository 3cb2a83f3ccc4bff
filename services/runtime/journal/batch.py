"""Records, the batch that one commit stores, and the chain that batches form.

Invariants: positions are consecutive from 1 and never reused once durable; a batch begins where the one before it
ended and carries that one's checksum, its own being CRC32C over it, the position, the count and the body: so a batch
that is damaged, missing, doubled or exchanged in the middle breaks the chain.

The body of a batch is, per record: u16 length of the stream's name, the name in UTF-8, u32 length of the payload, the
payload; integers big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import google_crc32c

from services.runtime.errors import invalid_argument, require_id

MAX_RECORD_BYTES: Final = 256 << 20
"""Largest payload. SQLite ends at 1 GB a row, and a commit of this size already takes a second or two."""

BATCH_BYTES: Final = 4 << 20
"""A commit takes no further parcel beyond this: one large commit makes all who wait for it wait longer, and joining and
checksumming 4 MiB holds the interpreter for about a millisecond."""

PARCEL_BYTES: Final = 512 << 20
"""Records of one turn are committed together up to this, which SQLite's limit of 1 GB a row leaves room for."""

_NAME: Final = struct.Struct(">H")
_LENGTH: Final = struct.Struct(">I")
_POSITION: Final = struct.Struct(">QQ")

pack_length = _LENGTH.pack


class Record(NamedTuple):
    """One record as it was handed in, with its position (from 1)."""

    position: int
    stream: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """The records `first` to `first + count - 1`."""

    first: int
    count: int
    body: bytes

    def records(self) -> Iterator[Record]:
        """Yield the records in order. Raises ValueError if the body does not hold `count` of them."""
        body, offset = self.body, 0
        names: dict[bytes, str] = {}
        try:
            for position in range(self.first, self.first + self.count):
                start = offset + _NAME.size
                end = start + _NAME.unpack_from(body, offset)[0]
                name = body[start:end]
                stream = names.get(name)
                if stream is None:
                    stream = names[name] = name.decode("utf-8")
                start = end + _LENGTH.size
                offset = start + _LENGTH.unpack_from(body, end)[0]
                yield Record(position, stream, body[start:offset])
        except struct.error as error:
            raise ValueError("the body of a batch ends within a record") from error
        if offset != len(body):
            raise ValueError("the body of a batch does not end with its last record")


class BrokenChainError(Exception):
    """A batch does not follow the one before it. `last_good` is the last position that is sound."""

    def __init__(self, detail: str, last_good: int) -> None:
        super().__init__(detail)
        self.detail = detail
        self.last_good = last_good


def stream_prefix(stream: str) -> bytes:
    """Return what stands before the payload's length in each record of a stream.

    Raises INVALID_ARGUMENT / BAD_ID if the name is not an id.
    """
    name = require_id("stream", stream).encode("utf-8")
    return _NAME.pack(len(name)) + name


def require_payload(payload: bytes) -> None:
    """Refuse a payload that is too large (INVALID_ARGUMENT)."""
    if len(payload) > MAX_RECORD_BYTES:
        message = f"a record holds at most {MAX_RECORD_BYTES} bytes, this one has {len(payload)}"
        raise invalid_argument("payload", message, value=len(payload))


def batch_crc(previous: int, first: int, count: int, body: bytes) -> int:
    """Return the checksum of a batch that follows one with checksum `previous`."""
    crc: int = google_crc32c.extend(google_crc32c.extend(previous, _POSITION.pack(first, count)), body)
    return crc


class Chain:
    """Checks batches read in order, from the one that holds `next_position` on.

    Of the first batch the predecessor is not known, so it may begin earlier and its link is taken as it is.
    """

    def __init__(self, next_position: int) -> None:
        self.next_position = next_position
        self.crc: int | None = None

    def accept(self, row: tuple[object, ...]) -> Batch:
        """Return the batch of a row (first, count, previous checksum, checksum, body), or raise BrokenChainError."""
        first, count, previous, crc, body = row
        if not (
            isinstance(first, int)
            and isinstance(count, int)
            and isinstance(previous, int)
            and isinstance(crc, int)
            and isinstance(body, bytes)
        ):
            raise self._broken("a batch has fields of the wrong kind")
        if first > self.next_position or (self.crc is not None and first != self.next_position):
            raise self._broken(f"the batch at position {self.next_position} is missing")
        if first + count <= self.next_position:
            raise self._broken(f"a batch ends before position {self.next_position}")
        if self.crc is not None and previous != self.crc:
            raise self._broken(f"the batch at position {first} does not follow the one before it")
        if not 0 <= previous < 1 << 32 or batch_crc(previous, first, count, body) != crc:
            raise self._broken(f"the batch at position {first} has a wrong checksum")
        self.next_position = first + count
        self.crc = crc
        return Batch(first, count, body)

    def _broken(self, detail: str) -> BrokenChainError:
        return BrokenChainError(detail, self.next_position - 1)
