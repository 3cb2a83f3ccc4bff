"""Times, enums and numbers between the wire and the domain.

Invariants: an enum value this version does not know is INVALID_ARGUMENT naming the field; a number too large for its
field is sent as the largest that fits, never wrapped.
"""

from enum import Enum
from functools import cache
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from services.runtime.errors import invalid_argument
from services.runtime.waits import duration_of

E = TypeVar("E", bound=Enum)

_INT64_MAX = 2**63 - 1


def enum_of(kind: type[E], number: int, field: str, default: E) -> E:
    """The domain value of a wire enum; 0 is the default."""
    if number == 0:
        return default
    member: E | None = members(kind).get(number)
    if member is None:
        message = f"{field} has no value {number}"
        raise invalid_argument(field, message, value=number, reason="UNKNOWN_ENUM_VALUE")
    return member


@cache
def members(kind: type[E]) -> dict[int, E]:
    """The members by number; several times as fast as asking the class."""
    return {member.value: member for member in kind}


def int64(number: int) -> int:
    """The number as it fits into an int64 field."""
    return min(number, _INT64_MAX)


def duration(seconds: float) -> Duration:
    """Seconds as a Duration; what lies in the past is 0."""
    return duration_of(max(0.0, seconds))


def timestamp(wall: float) -> Timestamp:
    """Unix seconds as a Timestamp."""
    made = Timestamp()
    made.FromNanoseconds(round(wall * 1e9))
    return made
