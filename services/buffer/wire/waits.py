"""Depth, the events of waits, and the ledger on the wire."""

from services.buffer.domain.depth import Counts, Depth
from services.buffer.domain.dropped import DroppedPrompt
from services.buffer.domain.evictions import EvictionReason, EvictionSummary
from services.buffer.domain.group import Group
from services.buffer.domain.ledger import Ledger
from services.buffer.domain.manifest import trajectory_metrics
from services.buffer.domain.refill import RefillClaim
from services.buffer.domain.waits import WaitEnd
from services.buffer.wire.outputs import show_outputs
from services.buffer.wire.scalars import duration, int64
from turnout.buffer.v1 import buffer_pb2 as pb


def counts_to(counts: Counts) -> pb.GroupCounts:
    """Groups by state."""
    return pb.GroupCounts(
        pending=counts.pending,
        running=counts.running,
        finished=counts.finished,
        failed=counts.failed,
        sampled=counts.sampled,
    )


def depth_to(depth: Depth) -> pb.Depth:
    """A reading of the depth."""
    return pb.Depth(
        sampleable=depth.sampleable,
        counts=counts_to(depth.counts),
        hold=None if depth.hold is None else pb.Hold(group_id=depth.hold.group_id, span=int64(depth.hold.span)),
        unpaid_credits=depth.unpaid_credits,
        supply_ended=depth.supply_ended,
        intake_paused=depth.intake_paused,
        step=int64(depth.step),
        oldest_running_group_id=depth.oldest_running_group_id,
        oldest_running_for=duration(depth.oldest_running_for),
    )


def progress_to(depth: Depth, target: int) -> pb.WaitProgress:
    """How a wait stands."""
    return pb.WaitProgress(depth=depth_to(depth), target=target)


def refill_due_to(claim: RefillClaim) -> pb.RefillDue:
    """A demand for prompts."""
    return pb.RefillDue(count=claim.unpaid, refill_claim_id=claim.claim_id)


def reasons_to(by_reason: dict[EvictionReason, int]) -> list[pb.EvictionCount]:
    """Evicted groups by reason."""
    if not by_reason:
        return []
    return [
        pb.EvictionCount(reason=pb.EvictionReason.ValueType(reason.value), count=by_reason[reason])
        for reason in EvictionReason
        if by_reason.get(reason)
    ]


def evictions_to(summary: EvictionSummary) -> pb.EvictionMetrics:
    """What was evicted between two cursors."""
    if not summary.evicted:
        return pb.EvictionMetrics()
    return pb.EvictionMetrics(
        evicted=summary.evicted, by_reason=reasons_to(summary.by_reason), metrics=summary.metrics()
    )


def wait_done_to(end: WaitEnd) -> pb.WaitDone:
    """The final event of WaitForSampleable."""
    return pb.WaitDone(
        outcome=pb.WaitOutcome.ValueType(end.outcome.value),
        depth=depth_to(end.depth),
        evictions=evictions_to(end.evictions),
        next_cursor=end.next_cursor,
        reason=end.reason,
    )


def sample_done_to(end: WaitEnd, *, training: bool, lease: float) -> pb.SampleDone:
    """The final event of Sample; `lease` is the time left in wall seconds."""
    message = pb.SampleDone(
        outcome=pb.WaitOutcome.ValueType(end.outcome.value),
        depth=depth_to(end.depth),
        evictions=evictions_to(end.evictions),
        next_cursor=end.next_cursor,
        reason=end.reason,
    )
    if end.lease is not None:
        message.lease_id = end.lease.lease_id
        message.lease.CopyFrom(duration(lease))
        message.group_count = len(end.lease.groups)
        if training:
            message.metrics.update(trajectory_metrics(end.lease.groups, end.lease.step))
    return message


def sampled_to(group: Group) -> bytes:
    """One group of a batch, as an encoded SampledGroup: its results are that already, but for what stores keep."""
    message = pb.SampledGroup(group_id=group.group_id, born_step=int64(group.born), group_size=group.size)
    if group.tags:
        message.tags.update(group.tags)
    if group.failed:
        message.failed = True
        message.error = group.error
    if not group.placed:
        return group.results + message.SerializeToString()
    message.MergeFromString(group.results)
    show_outputs(message.trajectories, group.placed)
    return message.SerializeToString()


def dropped_to(partition: str, prompt: DroppedPrompt) -> pb.DroppedPrompt:
    """A prompt that was dropped."""
    return pb.DroppedPrompt(
        prompt_id=prompt.prompt_id,
        partition=partition,
        dropped=prompt.dropped,
        overcount=prompt.overcount,
        stale=prompt.stale,
        failed=prompt.failed,
        last_group_id=prompt.group_id,
        last_born_step=int64(prompt.born),
        last_step=int64(prompt.step),
        last_length=int64(prompt.length),
        last_attempt=prompt.attempt,
    )


def ledger_to(ledger: Ledger) -> pb.GetLedgerResponse:
    """The account of every group."""
    return pb.GetLedgerResponse(
        added=ledger.added,
        committed=ledger.committed,
        evicted=ledger.evicted,
        evicted_by_reason=reasons_to(ledger.evicted_by_reason),
        present=counts_to(ledger.present),
        credits_created=ledger.credits_created,
        credits_paid=ledger.credits_paid,
        credits_cancelled=ledger.credits_cancelled,
    )
