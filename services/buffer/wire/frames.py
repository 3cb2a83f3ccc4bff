"""Frames of payload bytes, serialised by hand.

Invariant: what is made here is byte for byte what protobuf makes of the message. Protobuf copies the bytes into the
message and again out of it, which at a megabyte a frame is most of the work of sending them.
"""

from typing import Final

# Field 2 of GetPayloadsResponse (chunk), length-delimited.
_CHUNK_TAG: Final = b"\x12"


def chunk_frame(data: bytes) -> bytes:
    """A serialised GetPayloadsResponse with a chunk."""
    return b"".join((_CHUNK_TAG, _varint(len(data)), data))


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)
