"""Where a worker's payload bytes go, and where it reads those of prompts and partial outputs.

Invariants: small payloads travel in the message; larger ones are in one store, the buffer's own unless another was
chosen; a reference is resolved by the store it names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient
from turnout.client._payloads import Bytes, join, size_of
from turnout.stores import PayloadStore, Stores, open_store


class Payloads:
    """The payloads of one worker."""

    def __init__(
        self, buffer: AsyncBufferClient, run_id: str, store: str | PayloadStore | None, inline_bytes: int
    ) -> None:
        self._buffer = buffer
        self._run_id = run_id
        self._store = None if store is None else open_store(store)
        self._stores = Stores(() if self._store is None else (self._store,))
        self._inline_bytes = inline_bytes

    async def make(self, data: Bytes | Sequence[Bytes], content_type: str) -> buffer_pb2.Payload:
        """Return bytes, or a sequence of them, as a Payload to hand in."""
        if size_of(data) <= self._inline_bytes:
            return buffer_pb2.Payload(inline=join(data), content_type=content_type)
        if self._store is None:
            ref = await self._buffer.put_payload(self._run_id, data)
        else:
            ref = await self._buffer.link.blocking(self._store.put, data)
        return buffer_pb2.Payload(ref=ref, content_type=content_type)

    async def read(self, payload: buffer_pb2.Payload, token: buffer_pb2.ClaimToken) -> bytes:
        """Return the bytes of a payload that a claim opens."""
        if not payload.HasField("ref"):
            return payload.inline
        if payload.ref.store:
            (data,) = await self._buffer.link.blocking(self._stores.get, [payload.ref])
            return bytes(data)
        async with contextlib.aclosing(self._buffer.get_payloads(self._run_id, [payload.ref], claim=token)) as payloads:
            return await anext(payloads)

    def close(self) -> None:
        """Let go of the store."""
        self._stores.close()
