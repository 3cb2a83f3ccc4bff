"""Where a worker's payload bytes go, and where it reads those of prompts and partial outputs.

Invariants: small payloads travel in the message; larger ones are in one store, the buffer's own unless another was
chosen; a store that is away or full is waited for; a reference is resolved by the store it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, TurnoutError
from turnout.client._payloads import Bytes, join, size_of
from turnout.stores import PayloadStore, Stores, open_store
from turnout.worker._outbox import is_passing

_log = logging.getLogger("turnout")

_PAUSE_S: Final = 1.0
"""Between tries while a store is away."""


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
        while True:
            try:
                return buffer_pb2.Payload(ref=await self._put(data), content_type=content_type)
            except TurnoutError as error:
                if not (is_passing(error) or error.reason == "STORE_FULL"):
                    raise
                # What was generated is worth more than the wait; the claim is renewed meanwhile.
                _log.warning("a payload cannot be put yet: %s", error)
            await asyncio.sleep(_PAUSE_S)

    async def _put(self, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        if self._store is None:
            return await self._buffer.put_payload(self._run_id, data)
        return await self._buffer.link.blocking(self._store.put, data)

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
