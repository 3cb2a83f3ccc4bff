"""The buffer's own store, in the shape of the others."""

from __future__ import annotations

from collections.abc import Sequence

from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient
from turnout.client._payloads import Bytes


class EmbeddedStore:
    """Payloads inside the replay buffer: durable with it, deleted by it. Reading needs a sample lease or a claim."""

    name = ""

    def __init__(
        self, buffer: BufferClient, run_id: str, *, lease_id: str = "", claim: buffer_pb2.ClaimToken | None = None
    ) -> None:
        """`buffer` stays the caller's."""
        self._buffer = buffer
        self._run_id = run_id
        self._lease_id = lease_id
        self._claim = claim

    def put(self, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        """Upload; it is kept under a lease until a result or a prompt names it."""
        return self._buffer.put_payload(self._run_id, data)

    def get(self, refs: Sequence[buffer_pb2.PayloadRef]) -> list[Bytes]:
        """Download."""
        return list(self._buffer.get_payloads(self._run_id, refs, lease_id=self._lease_id, claim=self._claim))

    def delete(self, ids: Sequence[str]) -> None:
        """The buffer deletes what nothing names any more by itself."""

    def close(self) -> None:
        """There is nothing to let go of."""
