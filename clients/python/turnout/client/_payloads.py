"""Payloads as frames and back: pure.

Invariants: a chunk has at most `CHUNK_BYTES`; the end frame carries the CRC32C of all chunks; a download is accepted
only if each payload has its announced size and checksum; a torn download goes on at the byte where it was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import google_crc32c
import grpc

from turnout.buffer.v1 import buffer_pb2
from turnout.client._errors import TurnoutError, make_error
from turnout.engine.v1 import engine_pb2

CHUNK_BYTES: Final = 1024 * 1024
"""As the contract advises."""

INLINE_BYTES: Final = 256 * 1024
"""The largest payload that may travel inside a message."""

Bytes: TypeAlias = "bytes | bytearray | memoryview[Any]"
"""Anything with bytes in one piece."""


def chunks(data: Bytes | Sequence[Bytes]) -> Iterator[bytes]:
    """Cut bytes, or a sequence of them, into chunks; small parts travel together. Each byte is copied once."""
    gathered: list[memoryview] = []
    size = 0
    for part in parts_of(data):
        view = memoryview(part).cast("B")
        start = 0
        while start < len(view):
            piece = view[start : start + CHUNK_BYTES - size]
            gathered.append(piece)
            start += len(piece)
            size += len(piece)
            if size == CHUNK_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


def parts_of(data: Bytes | Sequence[Bytes]) -> Sequence[Bytes]:
    """Return bytes, or a sequence of them, as a sequence."""
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else data


def size_of(data: Bytes | Sequence[Bytes]) -> int:
    """Return the number of bytes."""
    return sum(memoryview(part).nbytes for part in parts_of(data))


def crc32c_of(data: Bytes | Sequence[Bytes]) -> int:
    """Return the CRC32C of bytes, or of a sequence of them one behind the other."""
    crc = 0
    for part in parts_of(data):
        if isinstance(part, bytes):
            crc = google_crc32c.extend(crc, part)
            continue
        view = memoryview(part).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            # The library takes nothing but bytes; a chunk at a time is in the processor's cache.
            crc = google_crc32c.extend(crc, bytes(view[start : start + CHUNK_BYTES]))
    return crc


def join(data: Bytes | Sequence[Bytes]) -> bytes:
    """Return bytes, or a sequence of them, as one; bytes are not copied."""
    return data if isinstance(data, bytes) else b"".join(parts_of(data))


def put_frames(run_id: str, data: Bytes | Sequence[Bytes]) -> Iterator[buffer_pb2.PutPayloadRequest]:
    """Return the frames of PutPayload."""
    yield buffer_pb2.PutPayloadRequest(header=buffer_pb2.PutPayloadHeader(run_id=run_id, size=size_of(data)))
    crc = 0
    for chunk in chunks(data):
        crc = google_crc32c.extend(crc, chunk)
        yield buffer_pb2.PutPayloadRequest(chunk=chunk)
    yield buffer_pb2.PutPayloadRequest(end=buffer_pb2.PutPayloadEnd(crc32c=crc))


def weight_frames(
    header: engine_pb2.UpdateWeightsHeader, data: Bytes | Sequence[Bytes]
) -> Iterator[engine_pb2.UpdateWeightsRequest]:
    """Return the frames of UpdateWeights."""
    yield engine_pb2.UpdateWeightsRequest(header=header)
    crc = 0
    for chunk in chunks(data):
        crc = google_crc32c.extend(crc, chunk)
        yield engine_pb2.UpdateWeightsRequest(chunk=chunk)
    yield engine_pb2.UpdateWeightsRequest(end=engine_pb2.UpdateWeightsEnd(crc32c=crc))


class Download:
    """Puts the frames of GetPayloads together; each byte is copied at most once."""

    def __init__(self, refs: Sequence[buffer_pb2.PayloadRef]) -> None:
        self._refs = refs
        self._index = 0
        self._base = 0
        self._part: list[bytes] = []
        self._size = 0

    @property
    def complete(self) -> bool:
        """Whether every payload arrived."""
        return self._index == len(self._refs)

    def resume(self) -> tuple[Sequence[buffer_pb2.PayloadRef], int]:
        """Return the references to ask for now, and the byte to start at; what is complete is not asked for again."""
        self._base = self._index
        if not self.complete and self._size == self._refs[self._index].size > 0:
            # All bytes came but not the end; from behind the last byte the service would go on with the next payload.
            self._part[-1] = self._part[-1][:-1]
            self._size -= 1
        return self._refs[self._index :], self._size

    def take(self, frame: buffer_pb2.GetPayloadsResponse) -> bytes | None:
        """Take one frame; return a payload when this frame completes it. Raises DataLoss."""
        kind = frame.WhichOneof("frame")
        if self.complete:
            raise self._lost("a frame came after the last payload")
        if kind == "header":
            if self._base + frame.header.ref_index != self._index or frame.header.offset != self._size:
                raise self._lost(f"the download goes on at {frame.header.ref_index}/{frame.header.offset}")
        elif kind == "chunk":
            if frame.chunk:
                self._part.append(frame.chunk)
                self._size += len(frame.chunk)
        elif kind == "end":
            return self._end(frame.end.crc32c)
        return None

    def _end(self, announced: int) -> bytes:
        # A single chunk is not copied at all.
        ref, data = self._refs[self._index], b"".join(self._part)
        crc = google_crc32c.value(data)
        if len(data) != ref.size or crc != announced or (ref.crc32c and crc != ref.crc32c):
            raise self._lost(f"payload {ref.id} arrived with {len(data)} of {ref.size} bytes and checksum {crc:#010x}")
        self._index += 1
        self._part, self._size = [], 0
        return data

    def _lost(self, message: str) -> TurnoutError:
        reason = "CRC_MISMATCH" if "checksum" in message else "FRAME_OUT_OF_ORDER"
        return make_error(
            grpc.StatusCode.DATA_LOSS, reason, message, {"ref_index": str(self._index)}, from_service=False
        )
