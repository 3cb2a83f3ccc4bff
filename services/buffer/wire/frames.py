"""Frames of bytes that are there already, written and read by hand.

Invariant: what is made here is byte for byte what protobuf makes of the message, and what is read here is what protobuf
reads; whatever else a frame may be is left to protobuf. It copies the bytes into the message and again out of it, which
at a megabyte a frame is most of the work of moving them, and takes groups apart.
"""

from collections.abc import Iterable
from typing import Final

# Field 2 of GetPayloadsResponse and of PutPayloadRequest (chunk), length-delimited.
_CHUNK_TAG: Final = b"\x12"
# Where a length of up to 35 bits ends at the latest.
_MAX_VARINT: Final = 6
# Field 4 of SampleResponse (groups), and field 1 of the SampledGroups in it.
_GROUPS_TAG: Final = b"\x22"
_GROUP_TAG: Final = b"\x0a"


def chunk_frame(data: bytes) -> bytes:
    """A serialised GetPayloadsResponse with a chunk."""
    return b"".join((_CHUNK_TAG, _varint(len(data)), data))


def chunk_of(frame: bytes) -> bytes | None:
    """The chunk of a serialised PutPayloadRequest; None if that is not all there is in it."""
    if frame[:1] != _CHUNK_TAG:
        return None
    size = 0
    for place, byte in enumerate(frame[1:_MAX_VARINT]):
        size |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            data = frame[place + 2 :]
            return data if len(data) == size else None
    return None


def groups_frame(groups: Iterable[bytes]) -> bytes:
    """A serialised SampleResponse with serialised groups."""
    parts: list[bytes] = []
    for group in groups:
        parts += _GROUP_TAG, _varint(len(group)), group
    body = b"".join(parts)
    return b"".join((_GROUPS_TAG, _varint(len(body)), body))


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)
