"""Errors of the client.

TurnoutError                 every call that did not succeed
├── Cancelled                CANCELLED: the call was cancelled
├── InvalidArgument          INVALID_ARGUMENT: wrong whatever the state is
├── DeadlineExceeded         DEADLINE_EXCEEDED
├── NotFound                 NOT_FOUND
│   └── RunNotFound          ... / RUN_NOT_FOUND
├── AlreadyExists            ALREADY_EXISTS
├── PermissionDenied         PERMISSION_DENIED
├── Unauthenticated          UNAUTHENTICATED
├── ResourceExhausted        RESOURCE_EXHAUSTED: a cap, or a message above the size limit; retried if told when
├── FailedPrecondition       FAILED_PRECONDITION: the state does not allow it
│   ├── StaleEpoch           ... / STALE_EPOCH: another trainer took the run over
│   ├── OutOfOrder           ... / OUT_OF_ORDER: the scheduler expects another call
│   └── StaleClaim           ... / STALE_CLAIM: the claim was lost
├── Aborted                  ABORTED
├── OutOfRange               OUT_OF_RANGE
├── Unimplemented            UNIMPLEMENTED
├── InternalError            INTERNAL, UNKNOWN
├── Unavailable              UNAVAILABLE, or the connection was lost: retried
├── DataLoss                 DATA_LOSS: a checksum did not match
└── PartialFailure           any status / PARTIAL: some replicas did not do it; names the operation

Invariants: every error that leaves the client is one of these; each carries the canonical code, the service's reason
(the name of the code if no Turnout service answered) and the metadata that names what offended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import grpc
from google.rpc import error_details_pb2, status_pb2

from turnout.buffer.v1 import buffer_pb2


class TurnoutError(Exception):
    """A call that did not succeed."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        metadata: Mapping[str, str] | None = None,
        *,
        from_service: bool = True,
    ) -> None:
        super().__init__(message)
        self.code = code
        """Canonical code."""
        self.reason = reason
        """UPPER_SNAKE reason, to match on."""
        self.message = message
        """One sentence for a person."""
        self.metadata: dict[str, str] = dict(metadata or {})
        """Offending fields and values."""
        self.from_service = from_service
        """False if no Turnout service sent it: the connection failed, a proxy answered or a deadline passed here."""
        self.retry_after: float | None = None
        """Seconds after which the same call may succeed, if the service said so."""

    def __str__(self) -> str:
        return f"{self.code.name} / {self.reason}: {self.message}"


class Cancelled(TurnoutError):
    """The call was cancelled."""


class InvalidArgument(TurnoutError):
    """The request is wrong whatever the state is; metadata["field"] names what."""


class DeadlineExceeded(TurnoutError):
    """No answer came in time."""


class NotFound(TurnoutError):
    """What the request names does not exist."""


class RunNotFound(NotFound):
    """The run does not exist at that service."""


class AlreadyExists(TurnoutError):
    """It exists already, with other content."""


class PermissionDenied(TurnoutError):
    """The caller may not do this."""


class Unauthenticated(TurnoutError):
    """The caller is not known."""


class ResourceExhausted(TurnoutError):
    """A cap is reached, or a message is above the size limit."""


class FailedPrecondition(TurnoutError):
    """The state does not allow the call; repeating it unchanged will not help."""


class StaleEpoch(FailedPrecondition):
    """Another trainer took the run over; this one must stop."""


class OutOfOrder(FailedPrecondition):
    """The scheduler expects another call now; the metadata names it."""


class StaleClaim(FailedPrecondition):
    """The claim expired or its trajectories were issued again."""


class Aborted(TurnoutError):
    """Another call got in between."""


class OutOfRange(TurnoutError):
    """A position lies outside what there is."""


class Unimplemented(TurnoutError):
    """The server does not offer the call."""


class InternalError(TurnoutError):
    """A fault of the service."""


class Unavailable(TurnoutError):
    """The service cannot be reached, or cannot answer now; repeating the call later is safe."""


class DataLoss(TurnoutError):
    """Bytes arrived damaged."""


class PartialFailure(TurnoutError):
    """Some replicas did not do what was asked; repeating the call acts only on what is left."""

    @property
    def operation_id(self) -> str:
        """The operation, for GetOperation."""
        return self.metadata.get("operation_id", "")


_BY_CODE: Final[Mapping[grpc.StatusCode, type[TurnoutError]]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNKNOWN: InternalError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}

_BY_REASON: Final[Mapping[tuple[grpc.StatusCode, str], type[TurnoutError]]] = {
    (grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND"): RunNotFound,
    (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH"): StaleEpoch,
    (grpc.StatusCode.FAILED_PRECONDITION, "OUT_OF_ORDER"): OutOfOrder,
    (grpc.StatusCode.FAILED_PRECONDITION, "STALE_CLAIM"): StaleClaim,
}

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

_CUT: Final[Mapping[grpc.StatusCode, tuple[str, ...]]] = {
    grpc.StatusCode.CANCELLED: ("",),
    # The second one is what asyncio stubs say when the call ends while they are writing, whatever it ended with.
    grpc.StatusCode.INTERNAL: ("RST_STREAM", "Internal error from Core"),
    grpc.StatusCode.UNKNOWN: ("Stream removed", "stream removed"),
}
"""What gRPC says, by code and text, when a server dies or a proxy cuts the stream under a call. With an ErrorInfo it is
not the network that speaks, and a cancellation of our own says so."""

_TOO_LARGE: Final = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")
"""What gRPC says of a message above the limit of either side: its size, and the limit."""

_OUR_OWN: Final = ("Locally cancelled", "Channel closed")


def make_error(
    code: grpc.StatusCode,
    reason: str,
    message: str,
    metadata: Mapping[str, str] | None = None,
    *,
    from_service: bool = True,
) -> TurnoutError:
    """Return the error of the class that belongs to the code and reason."""
    if reason == "PARTIAL":
        kind: type[TurnoutError] = PartialFailure
    else:
        kind = _BY_REASON.get((code, reason)) or _BY_CODE.get(code, TurnoutError)
    return kind(code, reason, message, metadata, from_service=from_service)


def from_rpc_error(error: grpc.RpcError, *, hint: str = "") -> TurnoutError:
    """Return what a failed call means. `hint` is added to the text when the service could not be reached."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return make_error(grpc.StatusCode.UNKNOWN, "UNKNOWN", str(error), from_service=False)
    code = error.code()
    message = error.details() or code.name
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            details = status_pb2.Status.FromString(value).details
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if any(detail.Unpack(info) for detail in details):
                known = make_error(code, info.reason, message, dict(info.metadata))
                if any(detail.Unpack(retry) for detail in details):
                    known.retry_after = retry.retry_delay.ToNanoseconds() / 1e9
                return known
    if any(text in message for text in _CUT.get(code, ())) and not message.startswith(_OUR_OWN):
        text = f"the call was cut: {message}"
        return make_error(grpc.StatusCode.UNAVAILABLE, "CONNECTION_LOST", text, from_service=False)
    size = _TOO_LARGE.search(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and size:
        numbers = {"cap": "max_message_bytes", "limit": size[2], "present": size[1]}
        return make_error(code, "MESSAGE_TOO_LARGE", message, numbers, from_service=False)
    if code is grpc.StatusCode.UNAVAILABLE and hint:
        message = f"{message} ({hint})"
    return make_error(code, code.name, message, from_service=False)


def stream_ended(message: str) -> TurnoutError:
    """Return the error for a stream that ended in order, but before all of it was there."""
    return make_error(grpc.StatusCode.UNAVAILABLE, "STREAM_ENDED", message, from_service=False)


def item_error(outcome: buffer_pb2.ItemOutcome) -> TurnoutError | None:
    """Return what one outcome of a batch call means; None if the item went well."""
    if outcome.code == 0:
        return None
    code = _CODES.get(outcome.code, grpc.StatusCode.UNKNOWN)
    return make_error(code, outcome.reason, outcome.message, dict(outcome.metadata))


def is_retryable(error: TurnoutError) -> bool:
    """Whether the same request may be sent again: UNAVAILABLE, but not the end of an operation, or told when to."""
    return isinstance(error, Unavailable) or error.retry_after is not None
