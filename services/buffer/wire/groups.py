"""Groups, claims, results and events on the wire."""

from services.buffer.domain.claims import Claim
from services.buffer.domain.events import GroupEvent
from services.buffer.domain.group import Group, GroupState
from services.buffer.domain.partition import GroupSpec, Partition
from services.buffer.domain.results import Failure, FailureKind, Progress, Result
from services.buffer.domain.trajectory import TrajectoryState
from services.buffer.wire.outputs import (
    ReadInline,
    finished_from,
    partial_from,
    payload_from,
    payload_to,
    show_outputs,
    shown_outputs,
    tags_from,
    token_from,
    token_to,
)
from services.buffer.wire.scalars import duration, enum_of, int64, timestamp
from services.runtime.errors import TurnoutError
from services.runtime.statuses import outcome_of
from turnout.buffer.v1 import buffer_pb2 as pb

# Bounds of what is in a claim: ids (512 bytes at most each), token, numbers, lease and trace; a trajectory less its
# partial output; a reference with id, store and content type; what stands around a map entry or an output.
_CLAIM_BYTES = 1300
_TRAJECTORY_BYTES = 16
_REF_BYTES = 1600
_ENTRY_BYTES = 16


# What nearly every item of every batch is answered; fields of messages take copies of it.
_FINE = pb.ItemOutcome()


def outcome_to(error: TurnoutError | None) -> pb.ItemOutcome:
    """How one item of a batch went; not to be changed."""
    if error is None:
        return _FINE
    outcome = outcome_of(error)
    return pb.ItemOutcome(code=outcome.code, reason=outcome.reason, message=outcome.message, metadata=outcome.metadata)


def spec_from(message: pb.GroupSpec, position: int) -> GroupSpec:
    """A prompt to add."""
    return GroupSpec(
        message.group_id,
        message.group_size if message.HasField("group_size") else None,
        payload_from(message.prompt, f"groups[{position}].prompt") if message.HasField("prompt") else None,
        tags_from(message.tags),
        message.prompt_id,
    )


def result_from(message: pb.TrajectoryResult) -> Result:
    """The result of one trajectory."""
    group_id, index = message.group_id, message.index
    return Result(
        group_id,
        index,
        finished_from(message.outputs, group_id, index),
        token_from(message.token) if message.HasField("token") else None,
    )


def failure_from(message: pb.TrajectoryFailure) -> Failure:
    """One failed attempt."""
    return Failure(
        message.group_id,
        message.index,
        # 0 is refused by the domain as an error of this item alone.
        None if message.kind == 0 else enum_of(FailureKind, message.kind, "kind", FailureKind.PERMANENT),
        token_from(message.token) if message.HasField("token") else None,
        error=message.error,
        partial=partial_from(message.partial.outputs, message.group_id, message.index),
    )


def progress_from(message: pb.TrajectoryProgress) -> Progress:
    """How far a trajectory is."""
    return Progress(
        message.group_id,
        message.index,
        message.done,
        message.total if message.HasField("total") else None,
        token_from(message.token) if message.HasField("token") else None,
        message.engine_request_id,
    )


def claim_size(group: Group, limit: int) -> int:
    """Upper bound of the bytes that a claim on up to `limit` trajectories of the group takes in an answer."""
    size = _CLAIM_BYTES + _TRAJECTORY_BYTES * min(limit, group.pending)
    if group.prompt is not None:
        size += group.prompt.size if group.prompt.inline else _REF_BYTES
    size += sum(len(name.encode()) + len(value.encode()) + _ENTRY_BYTES for name, value in group.tags.items())
    if group.has_partials:
        for partial in (member.partial for member in group.members):
            if partial is not None:
                size += len(partial.encoded) + len(partial.rewards) * (_REF_BYTES + _ENTRY_BYTES)
    return size


def claim_to(claim: Claim, lease: float, read_inline: ReadInline) -> pb.Claim:
    """A claim as its worker gets it; `lease` is the time left in wall seconds."""
    group = claim.group
    message = pb.Claim(
        token=token_to(claim.token),
        group_id=group.group_id,
        tags=group.tags,
        group_size=group.size,
        born_step=int64(group.born),
        lease=duration(lease),
        traceparent=group.trace,
    )
    if group.prompt is not None:
        message.prompt.CopyFrom(payload_to(group.prompt, read_inline))
    for index in sorted(claim.open):
        item = message.trajectories.add(index=index)
        partial = group.members[index].partial
        if partial is not None:
            item.partial.outputs.extend(shown_outputs(partial, index))
    return message


def group_to(partition: Partition, group: Group) -> pb.Group:
    """A group with its trajectories."""
    message = pb.Group(
        group_id=group.group_id,
        partition=partition.name,
        state=pb.GroupState.ValueType(group.state.value),
        born_step=int64(group.born),
        group_size=group.size,
        tags=group.tags,
        added_at=timestamp(group.added_at),
        sequence=group.sequence,
        lease_id=group.lease_id if group.state is GroupState.SAMPLED else "",
        prompt_id=group.prompt_id,
    )
    for index, trajectory in enumerate(group.trajectories):
        item = message.trajectories.add(
            index=index,
            state=pb.TrajectoryState.ValueType(trajectory.state.value),
            attempt=trajectory.attempt,
            used_attempts=trajectory.failures,
            error=trajectory.error,
        )
        if trajectory.outputs is not None:
            item.outputs.extend(shown_outputs(trajectory.outputs, index))
        if trajectory.done is not None:
            item.done = trajectory.done
        if trajectory.state is TrajectoryState.RUNNING:
            claim = partition.state.claims.get(trajectory.claim_id)
            item.worker_id = claim.worker_id if claim is not None else ""
    entries = pb.SampledGroup.FromString(group.results).trajectories
    show_outputs(entries, group.placed)
    for entry in entries:
        message.trajectories[entry.index].outputs.extend(entry.outputs)
    return message


def event_to(event: GroupEvent) -> pb.GroupEvent:
    """One thing that happened to one group; written for every kept event of a snapshot, so only what is there is."""
    message = pb.GroupEvent(
        sequence=event.sequence,
        kind=pb.GroupEventKind.ValueType(event.kind.value),
        partition=event.partition,
        group_id=event.group_id,
        index=event.index,
        born_step=int64(event.born),
    )
    time = message.time
    time.seconds, time.nanos = divmod(round(event.wall * 1e9), 1_000_000_000)
    if event.lengths:
        message.lengths.extend([int64(length) for length in event.lengths])
    if event.replica_id:
        message.replica_id = event.replica_id
    if event.reasons:
        message.reasons.extend([pb.EvictionReason.ValueType(reason.value) for reason in event.reasons])
    if event.trajectories:
        message.trajectories = event.trajectories
    if event.attempt:
        message.attempt = event.attempt
    if event.done is not None:
        message.done = event.done
    if event.engine_request_id:
        message.engine_request_id = event.engine_request_id
    return message
