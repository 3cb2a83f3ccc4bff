"""The errors of Turnout, as the domain raises them.

Invariants: nothing here knows gRPC, so a pure module may raise these; every error has a canonical code, an UPPER_SNAKE
reason that programs may match on, a message for people, and metadata that names what offended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, TypeVar

MAX_ID_BYTES: Final = 512
"""The longest id, in bytes of UTF-8: room for a path or a URI, small enough for an index."""


class Code(IntEnum):
    """Canonical codes; the numbers are those of google.rpc.Code and of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class TurnoutError(Exception):
    """An error with a canonical code.

    `metadata` names the offending fields and values; the values are turned into text. `retry_after`: wall seconds after
    which the same call may succeed, if that is known.
    """

    retry_after: float | None = None

    def __init__(self, code: Code, reason: str, message: str, metadata: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata: dict[str, str] = {key: str(value) for key, value in (metadata or {}).items()}

    def __str__(self) -> str:
        return f"{self.code.name} / {self.reason}: {self.message}"


_ABSENT: Final = object()
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")
N = TypeVar("N", int, float)


def invalid_argument(
    field: str, message: str, *, value: object = _ABSENT, reason: str = "INVALID_ARGUMENT", **metadata: object
) -> TurnoutError:
    """The caller sent something that is wrong whatever the state is. `field` is its name in the request."""
    named: dict[str, object] = {"field": field}
    if value is not _ABSENT:
        named["value"] = value
    return TurnoutError(Code.INVALID_ARGUMENT, reason, message, {**named, **metadata})


def not_found(reason: str, message: str, **metadata: object) -> TurnoutError:
    """What the request names does not exist."""
    return TurnoutError(Code.NOT_FOUND, reason, message, metadata)


def already_exists(reason: str, message: str, **metadata: object) -> TurnoutError:
    """What the request would create exists, with other content."""
    return TurnoutError(Code.ALREADY_EXISTS, reason, message, metadata)


def failed_precondition(reason: str, message: str, **metadata: object) -> TurnoutError:
    """The state does not allow the call; repeating it unchanged will not help."""
    return TurnoutError(Code.FAILED_PRECONDITION, reason, message, metadata)


def out_of_range(reason: str, message: str, **metadata: object) -> TurnoutError:
    """A position or amount lies past the end of what there is."""
    return TurnoutError(Code.OUT_OF_RANGE, reason, message, metadata)


def resource_exhausted(reason: str, message: str, **metadata: object) -> TurnoutError:
    """A cap is reached."""
    return TurnoutError(Code.RESOURCE_EXHAUSTED, reason, message, metadata)


def aborted(reason: str, message: str, **metadata: object) -> TurnoutError:
    """Another call got in between; repeating from the start may help."""
    return TurnoutError(Code.ABORTED, reason, message, metadata)


def unavailable(reason: str, message: str, **metadata: object) -> TurnoutError:
    """The service cannot answer now; repeating the call later is safe."""
    return TurnoutError(Code.UNAVAILABLE, reason, message, metadata)


def data_loss(reason: str, message: str, **metadata: object) -> TurnoutError:
    """Stored or transferred bytes are damaged."""
    return TurnoutError(Code.DATA_LOSS, reason, message, metadata)


def permission_denied(reason: str, message: str, **metadata: object) -> TurnoutError:
    """The caller is known and may not do this."""
    return TurnoutError(Code.PERMISSION_DENIED, reason, message, metadata)


def deadline_exceeded(reason: str, message: str, **metadata: object) -> TurnoutError:
    """Something that has a deadline did not answer within it."""
    return TurnoutError(Code.DEADLINE_EXCEEDED, reason, message, metadata)


def internal(reason: str, message: str, **metadata: object) -> TurnoutError:
    """A fault of the service itself, or of an engine behind it."""
    return TurnoutError(Code.INTERNAL, reason, message, metadata)


def unimplemented(call: str) -> TurnoutError:
    """The contract has the call, this server does not offer it."""
    return TurnoutError(Code.UNIMPLEMENTED, "UNIMPLEMENTED", f"{call} is not offered by this server", {"call": call})


def stale_epoch(epoch: int, current: int) -> TurnoutError:
    """A newer trainer has taken over the run; the caller must stop."""
    message = f"epoch {epoch} was superseded by {current}: another trainer has taken over this run"
    return failed_precondition("STALE_EPOCH", message, field="epoch", value=epoch, current=current)


def unknown_epoch(epoch: int, current: int) -> TurnoutError:
    """An epoch that was never granted here."""
    message = f"epoch {epoch} was never granted; the run's epoch is {current}"
    return failed_precondition("UNKNOWN_EPOCH", message, field="epoch", value=epoch, current=current)


def require_finite(field: str, value: float) -> float:
    """Return `value`, or refuse NaN and the infinities."""
    if not math.isfinite(value):
        raise invalid_argument(field, f"{field} must be a finite number, not {value}", value=value)
    return value


def require_non_negative(field: str, value: N) -> N:
    """Return `value`, or refuse what is below zero or not finite."""
    require_finite(field, value)
    if value < 0:
        raise invalid_argument(field, f"{field} must not be negative, it is {value}", value=value)
    return value


def require_positive(field: str, value: N) -> N:
    """Return `value`, or refuse what is not above zero or not finite."""
    require_finite(field, value)
    if value <= 0:
        raise invalid_argument(field, f"{field} must be above zero, it is {value}", value=value)
    return value


def require_id(field: str, text: str) -> str:
    """Return `text` unchanged, or refuse it as an id (reason BAD_ID).

    Ids are opaque: 1 to 512 bytes of UTF-8 without control characters (below U+0020, and U+007F), never trimmed or
    normalised.
    """

    def refuse(why: str) -> TurnoutError:
        # ascii() shows what is wrong without sending control characters or surrogates back.
        return invalid_argument(field, f"{field} {why}", value=ascii(text[:64]), reason="BAD_ID")

    if not text:
        raise refuse("must not be empty")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise refuse("is not valid Unicode: it has a lone surrogate") from None
    if size > MAX_ID_BYTES:
        raise refuse(f"is longer than {MAX_ID_BYTES} bytes: it has {size}")
    if _CONTROL.search(text):
        raise refuse("has a control character")
    return text


def describe(error: BaseException) -> str:
    """One line about any exception, for logs and for a person at a terminal; never for the wire."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
