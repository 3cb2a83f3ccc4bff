"""Domain errors as gRPC statuses: the one shared mapping.

Invariants: a status carries exactly one google.rpc.ErrorInfo of the domain `turnout`, and a google.rpc.RetryInfo if it
is known when to come back; its message has at most
`MAX_MESSAGE_BYTES`, and everything that leaves as trailers at most `MAX_TRAILERS_BYTES` as it is encoded on the wire;
text is cut on character boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.runtime.errors import Code, TurnoutError

DOMAIN: Final = "turnout"
MAX_MESSAGE_BYTES: Final = 1000
"""The limit of the design is 1 kB."""

MAX_TRAILERS_BYTES: Final = 6000
"""Below the 8 kB at which gRPC implementations begin to refuse a whole header list, with room for what proxies add."""

_MAX_VALUE_BYTES: Final = 256
"""One long value must not push the others out; an id that is longer is still recognised by its beginning."""

_MAX_ENTRIES: Final = 24
_FIXED_TRAILERS_BYTES: Final = 200
"""Three trailers with their names, and the 32 bytes that HTTP/2 counts for each."""


def cut(text: str, limit: int) -> str:
    """Return `text` as it can travel: valid Unicode of at most `limit` bytes of UTF-8, cut between characters."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return encoded.decode("utf-8")
    return encoded[: limit - 3].decode("utf-8", "ignore") + "…"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one item of a batch went; code 0 is OK and then the rest is empty."""

    code: int = 0
    reason: str = ""
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


def outcome_of(error: TurnoutError | None) -> Outcome:
    """Return the outcome of an item that failed with `error`, or that went well (None)."""
    if error is None:
        return Outcome()
    return Outcome(int(error.code), error.reason, cut(error.message, MAX_MESSAGE_BYTES), _metadata(error.metadata))


def status_of(error: TurnoutError) -> status_pb2.Status:
    """Return `error` as a google.rpc.Status that fits into the trailers."""
    message = cut(error.message, MAX_MESSAGE_BYTES)
    metadata = _metadata(error.metadata)
    status = _status(error, message, metadata)
    while _wire_size(status) > MAX_TRAILERS_BYTES:
        if metadata:
            # The first entries name the field and its value, so the last ones go first.
            metadata.popitem()
        else:
            message = cut(message, len(message.encode()) // 2)
        status = _status(error, message, metadata)
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TurnoutError) -> NoReturn:
    """End the call with the status of `error`."""
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError("abort_with_status returned")


def from_rpc_error(error: grpc.RpcError) -> TurnoutError:
    """Return the error that a call of another service ended with.

    A status without our ErrorInfo (the peer is gone, say) keeps its code and gets the code's name as its reason.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return TurnoutError(Code.UNKNOWN, "UNKNOWN", str(error))
    code = Code(error.code().value[0])
    message = error.details() or code.name
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            info = error_details_pb2.ErrorInfo()
            if any(detail.Unpack(info) for detail in status.details):
                known = TurnoutError(code, info.reason, message, dict(info.metadata))
                known.retry_after = _retry_after(status)
                return known
    return TurnoutError(code, code.name, message)


def _retry_after(status: status_pb2.Status) -> float | None:
    retry = error_details_pb2.RetryInfo()
    if not any(detail.Unpack(retry) for detail in status.details):
        return None
    return float(retry.retry_delay.ToNanoseconds()) / 1e9


def _metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    entries = list(metadata.items())[:_MAX_ENTRIES]
    return {cut(key, 64): cut(value, _MAX_VALUE_BYTES) for key, value in entries}


def _status(error: TurnoutError, message: str, metadata: Mapping[str, str]) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=int(error.code), message=message, details=[detail])
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        # Rounded up: who comes back too early is refused again.
        retry.retry_delay.FromMilliseconds(math.ceil(error.retry_after * 1000))
        status.details.add().Pack(retry)
    return status


def _wire_size(status: status_pb2.Status) -> int:
    # grpc-message is percent-encoded (all but printable ASCII, and "%"), grpc-status-details-bin is base64.
    percent_encoded = sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in status.message.encode())
    return _FIXED_TRAILERS_BYTES + percent_encoded + (int(status.ByteSize()) + 2) // 3 * 4
