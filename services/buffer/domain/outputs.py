"""Outputs: what a trajectory produces, and what makes a result acceptable.

Invariants: a finished trajectory has at least one output and no empty one, every reward is finite, and no segment was
left aborted or waiting to be continued. Outputs stay the bytes that arrived: beside them is only what decisions need.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from types import MappingProxyType

from services.runtime.errors import TurnoutError, invalid_argument

# Shared by everything that has no labels, which is most of large runs.
NOTHING: Mapping[str, str] = MappingProxyType({})

# A payload of a result up to this size stays with its group: what is kept to find bytes elsewhere takes as much memory.
SMALL_BYTES = 512


# The classes below are values that nobody changes. They are not declared frozen because that makes creating one four
# times as slow, and several are created for every result.


class SegmentEnd(Enum):
    """Why a segment ended; the numbers are those of the wire."""

    COMPLETED = 1
    CONTINUED = 2
    ABORTED = 3


@dataclass(slots=True)
class Payload:
    """Bytes kept in the buffer's own store (`store` empty) or an external one. `inline`: they came inline."""

    id: str
    size: int
    crc32c: int
    store: str = ""
    content_type: str = ""
    inline: bool = False


@dataclass(slots=True)
class InlinePayload:
    """Bytes as they arrive inside a message, before the store keeps them."""

    data: bytes
    crc32c: int
    content_type: str = ""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.data)


@dataclass(slots=True)
class Outputs:
    """All outputs of one trajectory.

    `encoded` is how they travel, opaque here, without `payloads`, each of which is given with the position of its
    output. `small` is the encoded payloads that stay here, of `small_bytes` together. Joined in order, the `encoded` of
    the trajectories of a group are those of the group, and so are the `small`. `length` counts generated units over all
    segments, `replica_id` is that of the last one, `rewards` are those of each output, `versions` the smallest and
    largest weight version over the segments that have tokens, if any is known.
    """

    encoded: bytes
    small: bytes = b""
    length: int = 0
    replica_id: str = ""
    rewards: tuple[Mapping[str, float], ...] = ()
    payloads: tuple[tuple[int, Payload | InlinePayload], ...] = ()
    small_bytes: int = 0
    versions: tuple[int, int] | None = None

    def kept(self) -> list[Payload]:
        """What it holds in a store."""
        return [payload for _, payload in self.payloads if isinstance(payload, Payload)]


def check_any(field: str, count: int) -> None:
    """Raise INVALID_ARGUMENT / EMPTY_TRAJECTORY unless there are outputs to finish with."""
    if not count:
        message = "a finished trajectory needs at least one output"
        raise invalid_argument(field, message, reason="EMPTY_TRAJECTORY")


def check_prompt(field: str, position: int, tokens: int) -> None:
    """Raise INVALID_ARGUMENT / OUT_OF_RANGE for a negative length of the prompt of an output."""
    if tokens < 0:
        raise _negative(f"{field}[{position}].prompt_tokens", tokens)


def check_segment(field: str, position: int, number: int, tokens: int, version: int, *, aborted: bool) -> None:
    """Raise INVALID_ARGUMENT naming the field unless this can be segment `number` of output `position`."""
    if tokens < 0:
        raise _negative(f"{field}[{position}].segments[{number}].tokens", tokens)
    if version < 0:
        raise _negative(f"{field}[{position}].segments[{number}].weight_version", version)
    if aborted:
        where = f"{field}[{position}].segments[{number}].end"
        raise _aborted(where, "an aborted segment makes the trajectory unusable")


def check_whole(field: str, position: int, segments: int, length: int, *, continued: bool) -> None:
    """Raise INVALID_ARGUMENT unless a finished output of that length, whose last segment ended so, is complete."""
    if not length:
        message = "an output of a finished trajectory must not be empty"
        raise invalid_argument(f"{field}[{position}].segments", message, reason="EMPTY_TRAJECTORY")
    if continued:
        raise _aborted(f"{field}[{position}].segments[{segments - 1}].end", "nothing follows the last segment")


def check_rewards(field: str, position: int, rewards: Mapping[str, float]) -> None:
    """Raise INVALID_ARGUMENT / REWARD_NOT_FINITE naming the reward."""
    for name, value in rewards.items():
        if not isfinite(value):
            message = f"reward {name!r} must be finite, it is {value}"
            where = f"{field}[{position}].rewards[{name}]"
            raise invalid_argument(where, message, value=value, reason="REWARD_NOT_FINITE")


def _aborted(field: str, message: str) -> TurnoutError:
    return invalid_argument(field, message, reason="ABORTED_SEGMENT")


def _negative(field: str, value: int) -> TurnoutError:
    return invalid_argument(field, f"{field} must not be negative, it is {value}", value=value, reason="OUT_OF_RANGE")
