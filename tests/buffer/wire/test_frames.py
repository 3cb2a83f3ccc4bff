"""Frames that are serialised by hand."""

from __future__ import annotations

import pytest

from services.buffer.wire.frames import chunk_frame
from turnout.buffer.v1 import buffer_pb2 as pb


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 20, 4 << 20])
def test_a_chunk_frame_is_what_protobuf_makes(size: int) -> None:
    """A tag or length that is off by one would be garbage to every client, in some sizes only."""
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert chunk_frame(data) == pb.GetPayloadsResponse(chunk=data).SerializeToString()
