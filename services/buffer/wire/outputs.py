"""Outputs, payloads and claim tokens on the wire.

Invariant: the CRC32C of inline bytes is computed as they arrive; bytes that are kept leave as references, except
prompts, which workers get as they came.
"""

from collections.abc import Callable, Iterable, Mapping
from sys import intern

from google_crc32c import value as crc32c

from services.buffer.domain.claims import ClaimToken
from services.buffer.domain.outputs import (
    NO_REWARDS,
    NOTHING,
    InlinePayload,
    Output,
    Payload,
    Segment,
    SegmentEnd,
)
from services.buffer.wire.scalars import enum_of
from services.runtime.errors import invalid_argument
from turnout.buffer.v1 import buffer_pb2 as pb

ReadInline = Callable[[Payload], bytes]


def token_from(message: pb.ClaimToken) -> ClaimToken:
    """A claim token; its parts are checked where it is used."""
    return ClaimToken(message.claim_id, message.attempt)


def token_to(token: ClaimToken) -> pb.ClaimToken:
    """A claim token."""
    return pb.ClaimToken(claim_id=token.claim_id, attempt=token.attempt)


def payload_from(message: pb.Payload, field: str) -> Payload | InlinePayload:
    """A payload as it arrived."""
    match message.WhichOneof("source"):
        case "inline":
            data = message.inline
            return InlinePayload(data, crc32c(data), message.content_type)
        case "ref":
            return ref_from(message.ref, message.content_type)
        case _:
            raise invalid_argument(field, f"{field} has neither bytes nor a reference", reason="PAYLOAD_EMPTY")


def ref_from(message: pb.PayloadRef, content_type: str = "") -> Payload:
    """A reference; whether it exists is for the domain to say."""
    return Payload(message.id, message.size, message.crc32c, message.store, content_type)


def ref_to(payload: Payload) -> pb.PayloadRef:
    """A reference."""
    return pb.PayloadRef(id=payload.id, store=payload.store, size=payload.size, crc32c=payload.crc32c)


def payload_to(payload: Payload, read_inline: ReadInline | None = None) -> pb.Payload:
    """A kept payload: as a reference, or as bytes if it came inline and `read_inline` is given."""
    if read_inline is not None and payload.inline:
        return pb.Payload(inline=read_inline(payload), content_type=payload.content_type)
    return pb.Payload(ref=ref_to(payload), content_type=payload.content_type)


def tags_from(tags: Mapping[str, str]) -> Mapping[str, str]:
    """Labels; what has none shares one empty mapping."""
    return dict(tags) if tags else NOTHING


def outputs_from(messages: Iterable[pb.Output], field: str) -> tuple[Output, ...]:
    """Outputs as they arrived; only what the wire can get wrong is checked."""
    return tuple([_output_from(message, field, position) for position, message in enumerate(messages)])


# The names of fields are put together only for errors: this is on the path of every result.
def _output_from(message: pb.Output, field: str, position: int) -> Output:
    rewards = message.rewards
    return Output(
        tuple([_segment_from(segment, field, position, number) for number, segment in enumerate(message.segments)]),
        message.prompt_tokens,
        {intern(name): value for name, value in rewards.items()} if rewards else NO_REWARDS,
        _output_payload_from(message.payload, field, position) if message.HasField("payload") else None,
        tags_from(message.tags),
    )


def _segment_from(message: pb.Segment, field: str, position: int, number: int) -> Segment:
    end = SegmentEnd.COMPLETED
    if message.end:
        end = enum_of(SegmentEnd, message.end, f"{field}[{position}].segments[{number}].end", end)
    return Segment(
        message.tokens,
        message.weight_version if message.HasField("weight_version") else None,
        end,
        # A few names over millions of segments.
        intern(message.replica_id),
    )


def _output_payload_from(message: pb.Payload, field: str, position: int) -> Payload | InlinePayload:
    if message.WhichOneof("source") == "inline":
        data = message.inline
        return InlinePayload(data, crc32c(data), intern(message.content_type))
    return payload_from(message, f"{field}[{position}].payload")


def output_to(output: Output) -> pb.Output:
    """A kept output, its payload as a reference."""
    message = pb.Output()
    write_output(output, message)
    return message


# The wire numbers of ends, since the value of a member is slow to ask for.
_END_NUMBERS = {end: pb.SegmentEnd.ValueType(end.value) for end in SegmentEnd}


def write_output(output: Output, message: pb.Output) -> None:
    """Write a kept output into an empty message where it stands: a batch has hundreds, and copies cost."""
    if output.prompt_tokens:
        message.prompt_tokens = output.prompt_tokens
    for segment in output.segments:
        written = message.segments.add()
        written.tokens = segment.tokens
        written.end = _END_NUMBERS[segment.end]
        if segment.weight_version is not None:
            written.weight_version = segment.weight_version
        if segment.replica_id:
            written.replica_id = segment.replica_id
    if output.rewards:
        rewards = message.rewards
        for name, value in output.rewards.items():
            rewards[name] = value
    if output.tags:
        message.tags.update(output.tags)
    payload = output.payload
    if isinstance(payload, Payload):
        ref = message.payload.ref
        ref.id = payload.id
        ref.size = payload.size
        ref.crc32c = payload.crc32c
        if payload.store:
            ref.store = payload.store
        if payload.content_type:
            message.payload.content_type = payload.content_type
