"""Images of single things: a group, a lease, a partition, as messages and back.

Invariant: what comes back behaves as what was written, in every later decision.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from services.buffer.domain.dropped import DroppedPrompt
from services.buffer.domain.events import GroupEvent, GroupEventKind
from services.buffer.domain.evictions import EvictionReason, EvictionSummary
from services.buffer.domain.group import NO_ODD, Group, GroupState
from services.buffer.domain.leases import Lease, LeaseState
from services.buffer.domain.outputs import Outputs, Payload
from services.buffer.domain.partition import Partition
from services.buffer.domain.refill import RefillClaim
from services.buffer.domain.trajectory import Trajectory, TrajectoryState
from services.buffer.wire.outputs import kept_outputs, payload_to, ref_from, tags_from, version_pair
from services.buffer.wire.scalars import int64
from services.buffer.wire.scalars import members as by_number
from services.buffer.wire.waits import dropped_to, reasons_to
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb

_TRAJECTORY_STATES = by_number(TrajectoryState)
_EVENT_KINDS = by_number(GroupEventKind)
_GROUP_STATES = by_number(GroupState)
_GONE = (GroupState.COMMITTED, GroupState.EVICTED)


def write_group(image: st.GroupImage, group: Group) -> None:
    """Fill an image with a group as it is."""
    write_prompt(image, group)
    image.longest = int64(group.longest)
    image.started_at = group.started_at
    if group.state not in _GONE:
        image.state = pb.GroupState.ValueType(group.state.value)
    if group.failed:
        image.failed = True
        image.error = group.error
    if group.zero_variance:
        image.zero_variance = True
    if group.lease_id:
        image.lease_id = group.lease_id
    if group.members:
        for index, trajectory in enumerate(group.members):
            if not trajectory.fresh:
                write_trajectory(image.odd[index], trajectory)
        image.reissued.extend(group.reissued())
        return
    image.results = group.results
    # Payloads without a byte are payloads, too: their number of bytes says nothing.
    image.small_bytes = group.small_bytes
    image.small = group.small
    image.versions.extend(chain.from_iterable(group.versions))
    for index, trajectory in group.odd.items():
        write_trajectory(image.odd[index], trajectory)
    for index, position, payload in group.placed:
        image.placed.add(index=index, position=position, payload=payload_to(payload))


def write_prompt(image: st.GroupImage, group: Group) -> None:
    """Fill an image with what AddGroups said."""
    image.group_id = group.group_id
    image.sequence = group.sequence
    image.born = int64(group.born)
    image.added_at = group.added_at
    image.size = group.size
    if group.tags:
        image.tags.update(group.tags)
    image.prompt_id = group.prompt_id
    if group.prompt is not None:
        image.prompt.CopyFrom(payload_to(group.prompt))
        image.prompt_inline = group.prompt.inline


def write_trajectory(image: st.TrajectoryImage, trajectory: Trajectory) -> None:
    """Fill an image with a trajectory as it is."""
    image.state = pb.TrajectoryState.ValueType(trajectory.state.value)
    image.attempt = trajectory.attempt
    image.failures = trajectory.failures
    image.claim_id = trajectory.claim_id
    image.error = trajectory.error
    if trajectory.outputs is not None:
        _write_outputs(image.outputs, trajectory.outputs)
    if trajectory.partial is not None:
        _write_outputs(image.partial, trajectory.partial)


def _write_outputs(image: st.OutputsImage, outputs: Outputs) -> None:
    image.encoded = outputs.encoded
    image.small = outputs.small
    for position, payload in outputs.payloads:
        if isinstance(payload, Payload):
            image.placed.add(position=position, payload=payload_to(payload))


def read_group(image: st.GroupImage) -> Group:
    """The group of an image."""
    prompt: Payload | None = None
    if image.HasField("prompt"):
        prompt = ref_from(image.prompt.ref, image.prompt.content_type)
        if image.prompt_inline:
            prompt = replace(prompt, inline=True)
    state = _GROUP_STATES[image.state] if image.state else GroupState.COMMITTED
    odd = {index: _read_trajectory(trajectory) for index, trajectory in image.odd.items()} if image.odd else NO_ODD
    members: list[Trajectory] = []
    if state is GroupState.PENDING or state is GroupState.RUNNING:
        members = [odd.get(index) or Trajectory() for index in range(image.size)]
        odd = NO_ODD
    group = Group(
        image.group_id,
        image.sequence,
        image.born,
        members or (),
        image.added_at,
        image.size,
        prompt,
        tags_from(image.tags),
        state,
        image.failed,
        image.zero_variance,
        started_at=image.started_at,
        lease_id=image.lease_id,
        error=image.error,
        results=image.results,
        placed=tuple([(placed.index, placed.position, _read_payload(placed.payload)) for placed in image.placed]),
        small=image.small,
        small_bytes=image.small_bytes,
        versions=tuple(map(version_pair, image.versions[::2], image.versions[1::2])),
        odd=odd,
        prompt_id=image.prompt_id,
        longest=image.longest,
    )
    group.put_back(image.reissued)
    return group


def _read_trajectory(image: st.TrajectoryImage) -> Trajectory:
    return Trajectory(
        _TRAJECTORY_STATES[image.state],
        image.attempt,
        image.failures,
        image.claim_id,
        _read_outputs(image.outputs) if image.HasField("outputs") else None,
        _read_outputs(image.partial) if image.HasField("partial") else None,
        error=image.error,
    )


def _read_outputs(image: st.OutputsImage) -> Outputs:
    placed = [(placed.position, _read_payload(placed.payload)) for placed in image.placed]
    return kept_outputs(image.encoded, image.small, placed)


def _read_payload(message: pb.Payload) -> Payload:
    return ref_from(message.ref, message.content_type)


def write_lease(
    image: st.LeaseImage, lease: Lease, state: LeaseState, ended_at: float, groups: Iterable[Group]
) -> None:
    """Fill an image with a lease as it was; `groups` are those whose payloads are kept after the commit."""
    image.lease_id = lease.lease_id
    image.partition = lease.partition
    image.step = int64(lease.step)
    image.group_ids.extend(lease.group_ids)
    image.request_id = lease.request_id
    image.fingerprint = lease.fingerprint
    image.state = state.value
    image.auto_commit = lease.auto_commit
    image.ended_at = ended_at
    for group in groups:
        image.retained = True
        write_group(image.groups.add(), group)


def read_lease(image: st.LeaseImage, partition: Partition) -> Lease:
    """The lease of an image, all groups of the partition being back already."""
    state = LeaseState(image.state)
    if state is LeaseState.LIVE:
        groups = [partition.groups[group_id] for group_id in image.group_ids]
    else:
        groups = [read_group(group) for group in image.groups]
    return Lease(
        image.lease_id,
        image.partition,
        image.step,
        groups or (),
        tuple(image.group_ids),
        image.request_id,
        image.fingerprint,
        state,
        image.auto_commit,
        image.ended_at,
    )


def write_evictions(image: st.EvictionsImage, end: int, summary: EvictionSummary) -> None:
    """Fill an image with a sum of evictions."""
    image.end = end
    image.evicted = summary.evicted
    image.by_reason.extend(reasons_to(summary.by_reason))
    image.span_sum = int64(summary.span_sum)
    image.span_max = int64(summary.span_max)
    image.span_min = int64(summary.span_min)


def read_evictions(image: st.EvictionsImage) -> EvictionSummary:
    """The sum of an image."""
    by_reason = Counter({EvictionReason(count.reason): count.count for count in image.by_reason})
    return EvictionSummary(image.evicted, by_reason, image.span_sum, image.span_max, image.span_min)


def write_partition(image: st.PartitionImage, partition: Partition) -> None:
    """Fill an image with the counters and the refill book of a partition; its eviction spans are left to the caller."""
    refill = partition.refill
    image.name = partition.name
    image.added = partition.added
    image.committed = partition.committed
    image.supply_ended = partition.supply_ended
    image.intake_paused = partition.intake_paused
    image.credits_created = refill.created
    image.credits_paid = refill.paid
    image.credits_cancelled = refill.cancelled
    image.credits_free = refill.free
    for claim in refill.claims():
        image.refill_claims.add(claim_id=claim.claim_id, unpaid=claim.unpaid)
    image.ended_refill_claims.extend(refill.ended())
    write_evictions(image.evictions, partition.evictions.total.evicted, partition.evictions.total)
    image.evictions_sealed = partition.evictions.sealed
    image.dropped.extend([dropped_to(partition.name, prompt) for prompt in partition.dropped.kept()])
    image.dropped_pushed_out = partition.dropped.pushed_out


def read_partition(image: st.PartitionImage, partition: Partition) -> None:
    """Give an empty partition the counters of an image."""
    partition.added = image.added
    partition.committed = image.committed
    partition.supply_ended = image.supply_ended
    partition.intake_paused = image.intake_paused
    refill = partition.refill
    refill.created = image.credits_created
    refill.paid = image.credits_paid
    refill.cancelled = image.credits_cancelled
    refill.free = image.credits_free
    claims = [RefillClaim(claim.claim_id, claim.unpaid, None) for claim in image.refill_claims]
    refill.restore(claims, image.ended_refill_claims)
    partition.evictions.total = read_evictions(image.evictions)
    partition.evictions.spans = [(span.end, read_evictions(span)) for span in image.eviction_spans]
    partition.evictions.sealed = image.evictions_sealed
    partition.dropped.restore(map(_read_dropped, image.dropped), image.dropped_pushed_out)


def _read_dropped(message: pb.DroppedPrompt) -> DroppedPrompt:
    return DroppedPrompt(
        message.prompt_id,
        message.dropped,
        message.overcount,
        message.stale,
        message.failed,
        message.last_group_id,
        message.last_born_step,
        message.last_step,
        message.last_length,
        message.last_attempt,
    )


def read_event(message: pb.GroupEvent) -> GroupEvent:
    """A kept event."""
    return GroupEvent(
        message.sequence,
        message.time.seconds + message.time.nanos / 1e9,
        _EVENT_KINDS[message.kind],
        message.partition,
        message.group_id,
        message.born_step,
        message.trajectories,
        message.index if message.HasField("index") else None,
        tuple(message.lengths),
        message.replica_id,
        tuple([EvictionReason(reason) for reason in message.reasons]) if message.reasons else (),
        message.attempt,
    )
