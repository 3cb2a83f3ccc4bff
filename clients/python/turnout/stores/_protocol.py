"""PayloadStore: where payload bytes are, as clients see it.

Invariants: a put makes a new id, which is never used again; what a reference names does not change; bytes are given out
only if they have the size and the CRC32C of their reference; deleting twice is deleting once. Nothing that came from
the network is unpickled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import grpc

from turnout.buffer.v1 import buffer_pb2
from turnout.client import TurnoutError
from turnout.client._errors import make_error
from turnout.client._payloads import Bytes, crc32c_of, size_of


@runtime_checkable
class PayloadStore(Protocol):
    """A store of payload bytes. Its calls block; any thread may make them."""

    @property
    def name(self) -> str:
        """`PayloadRef.store` of what it holds; empty for the buffer's own."""
        ...

    def put(self, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
        """Keep bytes, or a sequence of them one behind the other, under a new id; from then on they can be read.

        Raises Unavailable / STORE_UNAVAILABLE, ResourceExhausted / STORE_FULL.
        """
        ...

    def get(self, refs: Sequence[buffer_pb2.PayloadRef]) -> list[Bytes]:
        """Return the bytes of each reference, in order, read-only where they are shared.

        Raises NotFound / PAYLOAD_NOT_FOUND, DataLoss / PAYLOAD_DAMAGED, Unavailable / STORE_UNAVAILABLE.
        """
        ...

    def delete(self, ids: Sequence[str]) -> None:
        """Forget these; ids that are not there are fine. Raises Unavailable / STORE_UNAVAILABLE."""
        ...

    def close(self) -> None:
        """Let go of what this process holds; the bytes stay."""
        ...


def verified(ref: buffer_pb2.PayloadRef, data: Bytes) -> Bytes:
    """Return the bytes of a reference. Raises DataLoss / PAYLOAD_DAMAGED if they are not those it was made for."""
    size = size_of(data)
    crc = crc32c_of(data) if size == ref.size else None
    if crc != ref.crc32c:
        found = f"{size} bytes" if crc is None else f"CRC32C {crc:#010x}"
        message = f"payload {ref.id!r} of store {ref.store!r} has {found}, not {ref.size} bytes, {ref.crc32c:#010x}"
        raise make_error(
            grpc.StatusCode.DATA_LOSS,
            "PAYLOAD_DAMAGED",
            message,
            {"store": ref.store, "id": ref.id},
            from_service=False,
        )
    return data


def reference(store: str, payload_id: str, data: Bytes | Sequence[Bytes]) -> buffer_pb2.PayloadRef:
    """Return the reference of bytes that a store keeps under an id."""
    return buffer_pb2.PayloadRef(id=payload_id, store=store, size=size_of(data), crc32c=crc32c_of(data))


def missing(store: str, payload_id: str) -> TurnoutError:
    """The store does not hold it: it was deleted, or the store has lost it."""
    message = f"store {store!r} holds no payload {payload_id!r}: it was deleted, or lost with what kept it"
    metadata = {"store": store, "id": payload_id}
    return make_error(grpc.StatusCode.NOT_FOUND, "PAYLOAD_NOT_FOUND", message, metadata, from_service=False)


def unavailable(store: str, message: str) -> TurnoutError:
    """The store cannot be reached."""
    return make_error(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", message, {"store": store}, from_service=False)


def full(store: str, message: str) -> TurnoutError:
    """The store has no room."""
    return make_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL", message, {"store": store}, from_service=False)


def unusable(store: str, reason: str, message: str) -> TurnoutError:
    """This process is not set up for the store."""
    return make_error(grpc.StatusCode.FAILED_PRECONDITION, reason, message, {"store": store}, from_service=False)


def refused(store: str, payload_id: str, message: str) -> TurnoutError:
    """An id that the store did not make."""
    metadata = {"store": store, "id": payload_id}
    return make_error(grpc.StatusCode.INVALID_ARGUMENT, "BAD_PAYLOAD_ID", message, metadata, from_service=False)
