"""Expiry: what ends by itself in a run, and what of it is ended in one turn.

Invariants: what is over is first named and then ended, so that a replay ends the same; leases of a trainer that was
heard of since live on; what is ended in one turn is bounded where there can be much of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.buffer.domain import results
from services.buffer.domain.leases import LeaseState
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import Partition
from services.buffer.domain.run import Run

# Claims and uploads that end in one turn: some 5 ms, for which every other run waits.
EXPIRIES_PER_TURN = 256


@dataclass(frozen=True, slots=True)
class Expired:
    """What time ended, by id: claims, sample leases, committed leases whose payloads go, uploads that nobody named."""

    claims: Sequence[str] = ()
    leases: Sequence[str] = ()
    retained: Sequence[str] = ()
    uploads: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.claims or self.leases or self.retained or self.uploads)


def next_expiry(run: Run) -> float | None:
    """Domain time at which something ends by itself next, or a refill is to be shown, if anything is."""
    state = run.state
    candidates = [
        state.claims.next_expiry(),
        state.payloads.next_expiry(),
        state.leases.retained.next(),
        state.leases.deadlines.next(),
        *[partition.next_refill() for partition in run.partitions.values()],
    ]
    return min([at for at in candidates if at is not None], default=None)


def expired(run: Run, at: Moment) -> Expired:
    """What is over, or some of it if that is much; it is to be ended now.

    Leases of a trainer that was heard of since live on.
    """
    state = run.state
    extended = run.heard_at(at.now) + state.config.lease_times.sample
    leases: list[str] = []
    for lease_id in list(state.leases.deadlines.pop_due(at.now)):
        if extended > at.now:
            state.leases.deadlines.set(lease_id, extended)
        else:
            leases.append(lease_id)
    return Expired(
        state.claims.expired(at.now, EXPIRIES_PER_TURN),
        leases,
        list(state.leases.retained.pop_due(at.now)),
        state.payloads.expired(at.now, EXPIRIES_PER_TURN),
    )


def refills_due(run: Run, at: Moment) -> list[Partition]:
    """The partitions in which a wait may be shown what was gathered for it."""
    due = ((partition, partition.next_refill()) for partition in run.partitions.values())
    return [partition for partition, when in due if when is not None and when <= at.now]


def expire(run: Run, over: Expired, at: Moment) -> list[Partition]:
    """End what is over; returns the partitions that changed."""
    state = run.state
    touched: dict[str, None] = {}
    for claim in state.claims.take(over.claims):
        results.expire(run.partitions[claim.partition], claim, at)
        touched[claim.partition] = None
    for lease_id in over.leases:
        lease = state.leases.live[lease_id]
        run.give_back(lease, LeaseState.EXPIRED, at)
        touched[lease.partition] = None
    for lease_id in over.retained:
        state.leases.retained.discard(lease_id)
        run.let_payloads_go(state.leases.require(lease_id))
    state.payloads.forget_uploads(over.uploads)
    return [run.partitions[name] for name in touched]
