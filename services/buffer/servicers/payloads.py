"""Calls that move payload bytes."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import cast

from services.buffer.desk import Desk
from services.buffer.domain import access
from services.buffer.domain.outputs import Payload
from services.buffer.domain.run import Run
from services.buffer.servicers.base import BufferCalls, Context
from services.buffer.storage.checkpoints import Checkpoints
from services.buffer.wire.frames import chunk_frame, chunk_of
from services.buffer.wire.outputs import ref_from, ref_to, token_from
from services.buffer.wire.scalars import duration
from services.buffer.wire.small import small_payloads
from services.runtime.draining import Draining
from services.runtime.errors import TurnoutError, data_loss, invalid_argument, out_of_range, require_id
from services.runtime.handlers import parsed, takes_bytes
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb

SENT_CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 4 << 20


class PayloadCalls(BufferCalls):
    """PutPayload, GetPayloads."""

    def __init__(
        self, desk: Desk, draining: Draining, max_message_bytes: int, checkpoints: Checkpoints | None = None
    ) -> None:
        super().__init__(desk, draining, max_message_bytes, checkpoints)
        self._uploads = count(1)

    @takes_bytes
    async def PutPayload(
        self, requests: AsyncIterator[pb.PutPayloadRequest], context: Context
    ) -> pb.PutPayloadResponse:
        """Take one payload: header, chunks, end."""
        self.desk.check_space()
        frames = cast(AsyncIterator[bytes], requests)
        header = await self._header(frames)
        # Not an id that a decision makes: a replay of decisions would not come by it.
        payload_id = f"upload-{self.desk.incarnation}-{next(self._uploads):x}"
        upload = self.store.upload(payload_id)
        size = 0
        try:
            async for raw in frames:
                frame = _read(raw)
                if isinstance(frame, bytes):
                    if len(frame) > MAX_CHUNK_BYTES:
                        message = f"a chunk has at most {MAX_CHUNK_BYTES} bytes"
                        raise invalid_argument("chunk", message, value=len(frame), reason="CHUNK_TOO_LARGE")
                    size += len(frame)
                    self._check_room(self.run(header.run_id), size)
                    await upload.write(frame)
                elif frame.HasField("end"):
                    _check_end(header, frame.end, size, upload.crc32c)
                    await upload.finish()
                    answer = self._keep(header, payload_id, size, upload.crc32c)
                    await self.desk.durable()
                    return answer
                else:
                    raise _bad_frame(frame.WhichOneof("frame"), "after the header come chunks, then the end")
            raise _bad_frame(None, "the upload ended without its last frame")
        finally:
            upload.abort()

    async def _header(self, frames: AsyncIterator[bytes]) -> pb.PutPayloadHeader:
        raw = await anext(frames, None)
        frame = None if raw is None else parsed(pb.PutPayloadRequest, raw)
        kind = None if frame is None else frame.WhichOneof("frame")
        if frame is None or kind != "header":
            raise _bad_frame(kind, "the first frame is a header")
        header = frame.header
        run = self.run(header.run_id)
        if header.HasField("size") and header.size < 0:
            message = "size must not be negative"
            raise invalid_argument("header.size", message, value=header.size, reason="OUT_OF_RANGE")
        self._check_room(run, header.size)
        return header

    def _check_room(self, run: Run, size: int) -> None:
        run.state.payloads.check_room(size, run.state.config.caps.max_bytes, "size")

    def _keep(self, header: pb.PutPayloadHeader, payload_id: str, size: int, crc: int) -> pb.PutPayloadResponse:
        try:
            # The run may have been deleted, or filled by others, since the upload began.
            run = self.run(header.run_id)
            self._check_room(run, size)
        except TurnoutError:
            self.store.delete(payload_id)
            raise
        lease = run.state.config.lease_times.payload
        at = self.desk.moment()
        payload = run.state.payloads.uploaded(payload_id, size, crc, at.now + lease)
        self.desk.record(run, st.Record(upload=st.Upload(payload_id=payload_id, size=size, crc32c=crc)), at)
        self.desk.rearm(run)
        return pb.PutPayloadResponse(ref=ref_to(payload), lease=duration(self.wall(lease)))

    async def GetPayloads(
        self, request: pb.GetPayloadsRequest, context: Context
    ) -> AsyncIterator[pb.GetPayloadsResponse]:
        """Stream the bytes of references under a sample lease or a claim."""
        run = self.run(request.run_id)
        refs = [ref_from(ref) for ref in request.refs]
        small: dict[str, bytes] = {}
        if request.lease_id:
            lease = access.of_lease(run, require_id("lease_id", request.lease_id))
            opened = lease.payloads()
            small = small_payloads(lease.groups, refs)
        elif request.HasField("claim"):
            opened = access.of_claim(run, token_from(request.claim))
        else:
            raise invalid_argument("lease_id", "a sample lease or a claim is needed to read by", reason="REQUIRED")
        access.check_readable(run, opened, refs, small)
        total = sum(ref.size for ref in refs)
        if request.resume_at < 0:
            message = "resume_at must not be negative"
            raise invalid_argument("resume_at", message, value=request.resume_at, reason="OUT_OF_RANGE")
        if request.resume_at > total:
            message = f"the references have {total} bytes together"
            raise out_of_range("RESUME_BEYOND_END", message, field="resume_at", value=request.resume_at, total=total)
        # What is being read does not go away under the reader when its lease ends.
        book = run.state.payloads
        stored = [ref for ref in refs if ref.id not in small]
        book.pin(stored)
        try:
            skip = request.resume_at
            for position, payload in enumerate(refs):
                if skip and skip >= payload.size:
                    skip -= payload.size
                    continue
                async for frame in self._stream(run, payload, position, skip, small.get(payload.id)):
                    yield frame
                skip = 0
        finally:
            book.unpin(stored)

    async def _stream(
        self, run: Run, payload: Payload, position: int, offset: int, small: bytes | None
    ) -> AsyncIterator[pb.GetPayloadsResponse]:
        header = pb.GetPayloadsHeader(ref_index=position, offset=offset)
        yield pb.GetPayloadsResponse(header=header)
        if small is not None:
            yield cast(pb.GetPayloadsResponse, chunk_frame(small[offset:]))
            yield pb.GetPayloadsResponse(end=pb.GetPayloadsEnd(crc32c=payload.crc32c))
            return
        # The next bytes are read while the present ones are sent.
        ahead = self._read_ahead(payload, offset)
        try:
            while offset < payload.size:
                chunk = await ahead
                # The run may have been deleted since.
                self.desk.parking(run)
                offset += len(chunk)
                ahead = self._read_ahead(payload, offset)
                # Two copies of a megabyte less than by way of a message; bytes are sent as they are.
                yield cast(pb.GetPayloadsResponse, chunk_frame(chunk))
        finally:
            await _drop(ahead)
        yield pb.GetPayloadsResponse(end=pb.GetPayloadsEnd(crc32c=payload.crc32c))

    def _read_ahead(self, payload: Payload, offset: int) -> asyncio.Task[bytes]:
        async def read() -> bytes:
            if offset >= payload.size:
                return b""
            data = self.store.at_hand(payload.id, offset, SENT_CHUNK_BYTES)
            return data if data is not None else await self.store.read(payload.id, offset, SENT_CHUNK_BYTES)

        return asyncio.create_task(read())


async def _drop(task: asyncio.Task[bytes]) -> None:
    """Let go of bytes that nobody will be sent, and of an error in reading them."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _read(raw: bytes) -> bytes | pb.PutPayloadRequest:
    """A chunk, or the frame if it is anything else. By way of a message a megabyte would be copied twice more."""
    chunk = chunk_of(raw)
    if chunk is not None:
        return chunk
    frame = parsed(pb.PutPayloadRequest, raw)
    return frame.chunk if frame.HasField("chunk") else frame


def _check_end(header: pb.PutPayloadHeader, end: pb.PutPayloadEnd, size: int, crc: int) -> None:
    if header.HasField("size") and header.size != size:
        message = f"the header said {header.size} bytes, {size} came"
        raise invalid_argument("header.size", message, value=header.size, reason="SIZE_MISMATCH")
    if crc != end.crc32c:
        message = f"the bytes have CRC32C {crc:#010x}, the sender says {end.crc32c:#010x}"
        raise data_loss("CRC_MISMATCH", message, field="end.crc32c", value=end.crc32c, computed=crc)


def _bad_frame(kind: str | None, message: str) -> TurnoutError:
    return invalid_argument("frame", message, value=kind, reason="BAD_FRAME")
