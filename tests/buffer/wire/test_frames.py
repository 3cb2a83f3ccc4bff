"""Frames that are serialised by hand."""

from __future__ import annotations

import pytest

from services.buffer.wire.frames import chunk_frame, chunk_of, groups_frame
from turnout.buffer.v1 import buffer_pb2 as pb


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 20, 4 << 20])
def test_a_chunk_frame_is_what_protobuf_makes(size: int) -> None:
    """A tag or length that is off by one would be garbage to every client, in some sizes only."""
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert chunk_frame(data) == pb.GetPayloadsResponse(chunk=data).SerializeToString()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 20, 4 << 20])
def test_a_chunk_is_read_as_protobuf_reads_it(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert chunk_of(pb.PutPayloadRequest(chunk=data).SerializeToString()) == data


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x12",
        b"\x12\x05four",
        b"\x12\x03four",
        b"\x12\xff\xff\xff\xff\xff\xff",
        b"\x12\x80\x80\x80\x80\x80\x01x",
        pb.PutPayloadRequest(header=pb.PutPayloadHeader(run_id="run")).SerializeToString(),
        pb.PutPayloadRequest(end=pb.PutPayloadEnd(crc32c=1)).SerializeToString(),
        pb.PutPayloadRequest(chunk=b"x").SerializeToString() + pb.PutPayloadRequest(chunk=b"y").SerializeToString(),
        b"\x12\x01x\x38\x01",
    ],
)
def test_what_is_more_or_less_than_a_chunk_is_left_to_protobuf(frame: bytes) -> None:
    """Torn frames, other kinds, two chunks of which the last counts, and fields of a later contract."""
    assert chunk_of(frame) is None


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 127], [128, 20_000], [1 << 20]])
def test_a_frame_of_groups_is_what_protobuf_makes(sizes: list[int]) -> None:
    groups = [pb.SampledGroup(group_id="x" * size, born_step=size) for size in sizes]
    made = groups_frame([group.SerializeToString() for group in groups])
    assert made == pb.SampleResponse(groups=pb.SampledGroups(groups=groups)).SerializeToString()
