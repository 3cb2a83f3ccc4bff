"""Outputs, payloads and claim tokens on the wire.

Invariants: outputs are kept as they arrived, encoded as the `trajectories` of a SampledGroup, so that those of a group,
joined, are its manifest; in place of small payloads they have references, and of others nothing until the store has
named them. Bytes that are kept leave as references, except prompts, which workers get as they came.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from google_crc32c import value as crc32c

from services.buffer.domain.claims import ClaimToken
from services.buffer.domain.outputs import (
    NOTHING,
    SMALL_BYTES,
    InlinePayload,
    Outputs,
    Payload,
    SegmentEnd,
    check_any,
    check_prompt,
    check_rewards,
    check_segment,
    check_whole,
)
from services.buffer.wire.scalars import enum_of
from services.buffer.wire.small import small_id
from services.runtime.errors import invalid_argument
from turnout.buffer.storage.v1 import storage_pb2 as st
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


_COMPLETED = pb.SEGMENT_END_COMPLETED
_CONTINUED = pb.SEGMENT_END_CONTINUED
_ABORTED = pb.SEGMENT_END_ABORTED
_LARGEST_END = max(pb.SegmentEnd.values())
_NO_REWARDS: Mapping[str, float] = {}
# Above every version.
_NO_VERSION = 2**63


def finished_from(messages: Iterable[pb.Output], group_id: str, index: int) -> Outputs:
    """What a finished trajectory produced, checked."""
    outputs = _outputs_from(messages, "outputs", group_id, index, finished=True)
    check_any("outputs", len(outputs.rewards))
    return outputs


def partial_from(messages: Iterable[pb.Output], group_id: str, index: int) -> Outputs | None:
    """What an attempt had produced when it ended, checked; its payloads are for another attempt to name."""
    return _outputs_from(messages, "partial.outputs", group_id, index, finished=False) if messages else None


@lru_cache(1024)
def version_pair(low: int, high: int) -> tuple[int, int]:
    """One object for all trajectories of the same versions, which are few."""
    return low, high


def _outputs_from(messages: Iterable[pb.Output], field: str, group_id: str, index: int, *, finished: bool) -> Outputs:
    group = pb.SampledGroup()
    entry = group.trajectories.add()
    entry.index = index
    entry.outputs.extend(messages)
    length = small_bytes = 0
    low, high = _NO_VERSION, -1
    small: st.SmallPayloads | None = None
    replica_id = ""
    rewards: list[Mapping[str, float]] = []
    payloads: list[tuple[int, Payload | InlinePayload]] = []
    # This is on the path of every result: the copy is walked once, and the names of fields are for errors alone.
    for position, output in enumerate(entry.outputs):
        check_prompt(field, position, output.prompt_tokens)
        produced = number = end = 0
        for number, segment in enumerate(output.segments, 1):
            tokens, end = segment.tokens, segment.end
            if not end:
                segment.end = end = _COMPLETED
            elif end > _LARGEST_END or end < 0:
                enum_of(SegmentEnd, end, f"{field}[{position}].segments[{number - 1}].end", SegmentEnd.COMPLETED)
            version = segment.weight_version
            check_segment(field, position, number - 1, tokens, version, aborted=end == _ABORTED)
            if tokens and (version or segment.HasField("weight_version")):
                if version < low:
                    low = version
                if version > high:
                    high = version
            produced += tokens
            replica_id = segment.replica_id
        if not number:
            replica_id = ""
        if finished:
            check_whole(field, position, number, produced, continued=end == _CONTINUED)
        length += produced
        given = output.rewards
        named = {name: given[name] for name in given} if given else _NO_REWARDS
        check_rewards(field, position, named)
        rewards.append(named)
        if output.HasField("payload"):
            payload = output.payload
            data = payload.inline
            if finished and len(data) <= SMALL_BYTES and (data or payload.WhichOneof("source") == "inline"):
                small = small or st.SmallPayloads()
                small.payloads.add(index=index, position=position, data=data)
                small_bytes += len(data)
                ref = payload.ref
                ref.id = small_id(group_id, index, position)
                ref.size = len(data)
                ref.crc32c = crc32c(data)
            else:
                payloads.append((position, payload_from(payload, f"{field}[{position}].payload")))
                output.ClearField("payload")
    # Maps in order: a replay must come to the same bytes.
    return Outputs(
        group.SerializeToString(deterministic=True),
        b"" if small is None else small.SerializeToString(),
        length,
        replica_id,
        tuple(rewards),
        tuple(payloads),
        small_bytes,
        version_pair(low, high) if high >= 0 else None,
    )


def kept_outputs(encoded: bytes, small: bytes, payloads: Iterable[tuple[int, Payload]]) -> Outputs:
    """Outputs as they were kept, from what was written down of them."""
    (entry,) = pb.SampledGroup.FromString(encoded).trajectories
    segments = [segment for output in entry.outputs for segment in output.segments]
    versions = [segment.weight_version for segment in segments if segment.tokens and segment.HasField("weight_version")]
    last = entry.outputs[-1].segments if entry.outputs else ()
    return Outputs(
        encoded,
        small,
        sum([segment.tokens for segment in segments]),
        last[-1].replica_id if last else "",
        tuple([dict(output.rewards) for output in entry.outputs]),
        tuple(payloads),
        sum([len(payload.data) for payload in st.SmallPayloads.FromString(small).payloads]),
        version_pair(min(versions), max(versions)) if versions else None,
    )


def same_outputs(
    index: int, encoded: bytes, payloads: Sequence[tuple[int, Payload | InlinePayload]], offered: Outputs
) -> bool:
    """Whether a repeated result is the one that is kept already.

    Bytes are equal by size and CRC: a worker that lost its answer may have uploaded them under a new id.
    """
    return _described(index, encoded, payloads) == _described(index, offered.encoded, offered.payloads)


def _described(
    index: int, encoded: bytes, payloads: Iterable[tuple[int, Payload | InlinePayload]]
) -> list[tuple[pb.Output, tuple[int, int, str] | None]]:
    apart = {position: (payload.size, payload.crc32c, payload.content_type) for position, payload in payloads}
    described: list[tuple[pb.Output, tuple[int, int, str] | None]] = []
    for entry in pb.SampledGroup.FromString(encoded).trajectories:
        if entry.index != index:
            continue
        for position, output in enumerate(entry.outputs):
            bytes_of = apart.get(position)
            if output.HasField("payload"):
                ref = output.payload.ref
                bytes_of = (ref.size, ref.crc32c, output.payload.content_type)
                output.ClearField("payload")
            described.append((output, bytes_of))
    return described


# ---------------------------------------------------------------------------------------------------- what is shown


def show_outputs(entries: Iterable[pb.SampledTrajectory], placed: Sequence[tuple[int, int, Payload]]) -> None:
    """Put references to what stores keep into decoded outputs of a group."""
    if not placed:
        return
    apart = {(index, position): payload for index, position, payload in placed}
    for entry in entries:
        index = entry.index
        for position, output in enumerate(entry.outputs):
            payload = apart.get((index, position))
            if payload is not None:
                output.payload.CopyFrom(payload_to(payload))


def shown_outputs(outputs: Outputs, index: int) -> Sequence[pb.Output]:
    """The outputs of a trajectory whose group is not terminal."""
    entries = pb.SampledGroup.FromString(outputs.encoded).trajectories
    show_outputs(
        entries, [(index, position, payload) for position, payload in outputs.payloads if isinstance(payload, Payload)]
    )
    return entries[0].outputs
