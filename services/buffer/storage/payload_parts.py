"""The bytes of a payload as parts of an image."""

from collections.abc import AsyncIterator

from services.buffer.domain.outputs import Payload
from services.buffer.domain.payloads import PayloadStore
from services.buffer.wire.outputs import ref_to
from turnout.buffer.storage.v1 import storage_pb2 as st

# As large as a record of the payload segments, so that one is read at a time.
_PART_BYTES = 1 << 20


async def payload_parts(store: PayloadStore, payload: Payload) -> AsyncIterator[st.Part]:
    """The bytes of a payload as parts of an image."""
    offset = 0
    while offset < payload.size or not payload.size:
        data = await store.read(payload.id, offset, _PART_BYTES) if payload.size else b""
        part = st.Part()
        part.payload.ref.CopyFrom(ref_to(payload))
        part.payload.offset = offset
        part.payload.data = data
        yield part
        offset += len(data)
        if not payload.size:
            return
