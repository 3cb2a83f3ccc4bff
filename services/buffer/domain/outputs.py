"""Outputs: what trajectories produce, and what makes a result acceptable.

Invariants: a finished trajectory has at least one output and no empty one, every reward is finite, and no segment was
left aborted or waiting to be continued. Zero-token segments carry no weight version.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from types import MappingProxyType

from services.runtime.errors import TurnoutError, invalid_argument

# Shared by everything that has no labels or rewards, which is most outputs of large runs.
NOTHING: Mapping[str, str] = MappingProxyType({})
NO_REWARDS: Mapping[str, float] = MappingProxyType({})


# The classes below are values that nobody changes. They are not declared frozen because that makes creating one four
# times as slow, and several are created for every result.


class SegmentEnd(Enum):
    """Why a segment ended; the numbers are those of the wire."""

    COMPLETED = 1
    CONTINUED = 2
    ABORTED = 3


@dataclass(slots=True)
class Segment:
    """A stretch of output under one weight version; `tokens` in the run's unit."""

    tokens: int
    weight_version: int | None = None
    end: SegmentEnd = SegmentEnd.COMPLETED
    replica_id: str = ""


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
class Output:
    """One sequence a trajectory produced."""

    segments: tuple[Segment, ...]
    prompt_tokens: int = 0
    rewards: Mapping[str, float] = field(default_factory=lambda: NO_REWARDS)
    payload: Payload | InlinePayload | None = None
    tags: Mapping[str, str] = field(default_factory=lambda: NOTHING)

    @property
    def length(self) -> int:
        """Generated units over all segments."""
        total = 0
        for segment in self.segments:
            total += segment.tokens
        return total


def total_length(outputs: Iterable[Output]) -> int:
    """Generated units over all outputs."""
    return sum([output.length for output in outputs])


def last_replica(outputs: Sequence[Output]) -> str:
    """Replica that generated the last segment, empty if not known."""
    return outputs[-1].segments[-1].replica_id if outputs and outputs[-1].segments else ""


def version_bounds(outputs: Iterable[Output]) -> tuple[int, int] | None:
    """Smallest and largest weight version over segments that have tokens; None if none is known."""
    versions = [
        segment.weight_version
        for output in outputs
        for segment in output.segments
        if segment.tokens and segment.weight_version is not None
    ]
    return (min(versions), max(versions)) if versions else None


def check_finished(outputs: Sequence[Output]) -> None:
    """Raise INVALID_ARGUMENT naming the field unless the outputs can settle a trajectory."""
    if not outputs:
        raise _empty("outputs", "a finished trajectory needs at least one output")
    for position, output in enumerate(outputs):
        _check_output("outputs", position, output)
        if not output.length:
            raise _empty(f"outputs[{position}].segments", "an output of a finished trajectory must not be empty")
        if output.segments[-1].end is SegmentEnd.CONTINUED:
            last = len(output.segments) - 1
            raise _aborted(f"outputs[{position}].segments[{last}].end", "nothing follows the last segment")


def check_partial(outputs: Sequence[Output]) -> None:
    """Raise INVALID_ARGUMENT naming the field unless the outputs can be continued by another attempt."""
    for position, output in enumerate(outputs):
        _check_output("partial.outputs", position, output)


def _check_output(outputs: str, position: int, output: Output) -> None:
    if output.prompt_tokens < 0:
        raise _negative(f"{outputs}[{position}].prompt_tokens", output.prompt_tokens)
    for number, segment in enumerate(output.segments):
        if segment.tokens < 0:
            raise _negative(f"{outputs}[{position}].segments[{number}].tokens", segment.tokens)
        if segment.weight_version is not None and segment.weight_version < 0:
            raise _negative(f"{outputs}[{position}].segments[{number}].weight_version", segment.weight_version)
        if segment.end is SegmentEnd.ABORTED:
            where = f"{outputs}[{position}].segments[{number}].end"
            raise _aborted(where, "an aborted segment makes the trajectory unusable")
    for name, value in output.rewards.items():
        if not isfinite(value):
            where = f"{outputs}[{position}].rewards[{name}]"
            message = f"reward {name!r} must be finite, it is {value}"
            raise invalid_argument(where, message, value=value, reason="REWARD_NOT_FINITE")


def _empty(field: str, message: str) -> TurnoutError:
    return invalid_argument(field, message, reason="EMPTY_TRAJECTORY")


def _aborted(field: str, message: str) -> TurnoutError:
    return invalid_argument(field, message, reason="ABORTED_SEGMENT")


def _negative(field: str, value: int) -> TurnoutError:
    return invalid_argument(field, f"{field} must not be negative, it is {value}", value=value, reason="OUT_OF_RANGE")


def same_outputs(kept: Sequence[Output], offered: Sequence[Output]) -> bool:
    """Whether a repeated result is the one that is kept already."""
    return len(kept) == len(offered) and all(_same(mine, other) for mine, other in zip(kept, offered, strict=True))


def _same(mine: Output, other: Output) -> bool:
    return (
        mine.segments == other.segments
        and mine.prompt_tokens == other.prompt_tokens
        and mine.rewards == other.rewards
        and mine.tags == other.tags
        and _same_payload(mine.payload, other.payload)
    )


def _same_payload(mine: Payload | InlinePayload | None, other: Payload | InlinePayload | None) -> bool:
    """Bytes are equal by size and CRC: a worker that lost its answer may have uploaded them under a new id."""
    if mine is None or other is None:
        return mine is other
    return (mine.size, mine.crc32c, mine.content_type) == (other.size, other.crc32c, other.content_type)
