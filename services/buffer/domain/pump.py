"""Pump: what a change in a partition means for those who wait in it.

Invariants: evictions happen only while a trainer waits, at the highest step it waits for, so that what a read of the
depth at that step counts is what a Sample finds; each creates its credit before anything else is decided;
waits that watch see the depth before a Sample consumes it; Samples are met in the order of (target, arrival), with
disjoint batches, and never while a hold stands; one pass leaves nothing to do until something changes again, unless it
says that more is to be evicted. What is due and not evicted yet is not counted and not sampled either.
"""

from dataclasses import dataclass, field

from services.buffer.domain.depth import Depth
from services.buffer.domain.events import GroupEventKind
from services.buffer.domain.evictions import EvictionSummary
from services.buffer.domain.leases import Lease
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import Partition
from services.buffer.domain.refill import RefillClaim
from services.buffer.domain.waits import StepWaits, Wait, WaitEnd, WaitOutcome

# Some 2 ms. A call of another run takes several turns of the event loop, and so waits for several of these.
EVICTIONS_PER_TURN = 256


@dataclass(slots=True)
class Pumped:
    """What was decided, in this order, and what the waits are to be told, in this order."""

    evicted_at: int | None = None
    # What was evicted, if there may be more to evict: the caller pumps again, once others had their turn.
    evicted: list[str] = field(default_factory=list)
    more: bool = False
    made_claim: bool = False
    leases: list[Lease] = field(default_factory=list)
    sealed: bool = False
    refills: list[tuple[Wait, RefillClaim]] = field(default_factory=list)
    ended: list[tuple[Wait, WaitEnd]] = field(default_factory=list)


def pump(partition: Partition, at: Moment) -> Pumped:
    """Evict, show refill claims, and end the waits that can end."""
    pumped = Pumped()
    step = partition.waits.highest_trainer_step()
    if step is not None:
        evicted = partition.evict_due(step, at, EVICTIONS_PER_TURN)
        if evicted:
            pumped.evicted_at = step
        if len(evicted) == EVICTIONS_PER_TURN:
            pumped.evicted, pumped.more = evicted, True
        trainer = next(iter(partition.waits.trainers.values()))
        if not partition.supply_ended and not partition.intake_paused:
            free = partition.refill.free
            shown = partition.refill.show(trainer.order, partition.state.ids, at.now)
            pumped.made_claim = partition.refill.free < free
            pumped.refills = [(trainer, claim) for claim in shown]
    for step, waits in partition.waits.steps():
        _meet(partition, step, waits, at, pumped)
    if partition.supply_ended:
        for step, waits in partition.waits.steps():
            _exhaust(partition, step, waits, at, pumped)
    return pumped


def _meet(partition: Partition, step: int, waits: StepWaits, at: Moment, pumped: Pumped) -> None:
    held = partition.index.hold(step, partition.staleness) is not None
    reached = 0 if held else partition.index.sampleable(step, partition.staleness)
    # Nothing changes between one watch and the next, so those that saw the same evictions are told the same.
    ends: dict[int, WaitEnd] = {}
    while waits.watches and waits.watches[0].target <= reached:
        watch = waits.watches[0]
        end = ends.get(watch.cursor)
        if end is None:
            end = ends[watch.cursor] = _told(partition, watch, WaitOutcome.REACHED, at, pumped)
        partition.waits.remove(watch)
        pumped.ended.append((watch, end))
    while waits.samples and not held and waits.samples[0].target <= reached:
        wait = waits.samples[0]
        reached -= wait.target
        lease = take_lease(
            partition, LeaseSpec(step, wait.target, wait.request_id, wait.fingerprint, wait.auto_commit), at
        )
        pumped.leases.append(lease)
        same = [other for other in waits.samples if wait.request_id and other.request_id == wait.request_id]
        for other in same or [wait]:
            _end(partition, other, WaitOutcome.REACHED, at, pumped, lease)


def _exhaust(partition: Partition, step: int, waits: StepWaits, at: Moment, pumped: Pumped) -> None:
    reachable = partition.index.sampleable(step, partition.staleness) + partition.index.counts.in_flight
    for queue in (waits.watches, waits.samples):
        while queue and queue[-1].target > reachable:
            _end(partition, queue[-1], WaitOutcome.EXHAUSTED, at, pumped)


def _end(
    partition: Partition, wait: Wait, outcome: WaitOutcome, at: Moment, pumped: Pumped, lease: Lease | None = None
) -> None:
    partition.waits.remove(wait)
    pumped.ended.append((wait, _told(partition, wait, outcome, at, pumped, lease)))


def _told(
    partition: Partition, wait: Wait, outcome: WaitOutcome, at: Moment, pumped: Pumped, lease: Lease | None = None
) -> WaitEnd:
    pumped.sealed = pumped.sealed or not partition.evictions.sealed
    return end_of(partition, wait, outcome, at, lease)


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """What a Sample takes: the `batch` oldest groups at `step`."""

    step: int
    batch: int
    request_id: str = ""
    fingerprint: bytes = b""
    auto_commit: bool = False


def take_lease(partition: Partition, spec: LeaseSpec, at: Moment) -> Lease:
    """Lease a batch that is there."""
    groups = partition.index.oldest(spec.step, partition.staleness, spec.batch)
    lease = Lease(
        partition.state.ids.make("lease"),
        partition.name,
        spec.step,
        groups,
        tuple(group.group_id for group in groups),
        spec.request_id,
        spec.fingerprint,
        auto_commit=spec.auto_commit,
    )
    for group in groups:
        partition.state.touch(partition.name, group)
        partition.index.leave(group)
        group.lease(lease.lease_id)
        partition.index.enter(group)
        partition.log(GroupEventKind.SAMPLED, group, at)
    partition.state.leases.open(lease, at.now + partition.state.config.lease_times.sample)
    return lease


def time_out(partition: Partition, wait: Wait, at: Moment) -> WaitEnd:
    """End a wait whose time passed."""
    partition.waits.remove(wait)
    held = partition.index.hold(wait.step, partition.staleness) is not None
    reached = partition.index.sampleable(wait.step, partition.staleness) >= wait.target
    return end_of(partition, wait, WaitOutcome.HELD if held and reached else WaitOutcome.TIMED_OUT, at)


def end_of(partition: Partition, wait: Wait, outcome: WaitOutcome, at: Moment, lease: Lease | None = None) -> WaitEnd:
    """The final event of a wait that ends now."""
    depth = partition.depth(wait.step, at.now)
    evictions = partition.evictions.since(wait.cursor)
    reason = "" if outcome is WaitOutcome.REACHED else _explain(depth, wait.target, evictions)
    return WaitEnd(outcome, depth, evictions, partition.evictions.cursor(), reason, lease)


def _explain(depth: Depth, target: int, evictions: EvictionSummary) -> str:
    """One sentence on what stands in the way."""
    counts = depth.counts
    parts = [
        f"{depth.sampleable} of {target} groups are sampleable, {counts.pending} pending, {counts.running} running"
    ]
    if counts.sampled:
        parts.append(f"{counts.sampled} leased by Sample")
    if depth.oldest_running_group_id:
        running = f"{depth.oldest_running_group_id!r} has been running longest, for {depth.oldest_running_for:.1f} s"
        parts.append(running)
    if depth.hold is not None:
        parts.append(f"{depth.hold.group_id!r} with span {depth.hold.span} holds sampling")
    dominant = evictions.dominant()
    if dominant is not None:
        share = evictions.by_reason[dominant]
        parts.append(f"{evictions.evicted} evicted meanwhile, mostly {dominant.name.lower()} ({share})")
    if depth.unpaid_credits:
        parts.append(f"{depth.unpaid_credits} refill prompts are owed")
    if depth.supply_ended:
        parts.append("no more prompts will come")
    if depth.intake_paused:
        parts.append("intake is paused")
    return "; ".join(parts)
