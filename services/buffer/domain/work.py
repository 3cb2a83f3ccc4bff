"""Work: how pending trajectories get into workers' hands.

Invariants: the oldest group by (born step, arrival) goes first; a GATE keeps unstarted groups back while it is closed
and never those already started; while intake is paused nothing is handed out; under WAIT a group that nobody started
and that is too old is born again as it is claimed.
"""

from services.buffer.domain.claims import Claim, ClaimToken
from services.buffer.domain.events import GroupEventKind
from services.buffer.domain.group import Group, GroupState
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import Partition
from services.buffer.domain.staleness import reborn_at_claim


def gate_open(partition: Partition) -> bool:
    """Whether a group that nobody started may be handed out."""
    limit = partition.state.config.gate_limit if partition.training else None
    counts = partition.index.counts
    return limit is None or counts.running + counts.finished < limit


def next_group(partition: Partition) -> Group | None:
    """The group that the next claim would be on, if there is one."""
    if partition.intake_paused:
        return None
    return partition.index.next_work(unstarted=gate_open(partition))


def claim(partition: Partition, group: Group, worker_id: str, limit: int, at: Moment) -> Claim:
    """Hand up to `limit` trajectories of one attempt of `next_group` to a worker."""
    state = partition.state
    claim_id = state.ids.make("claim")
    state.touch(partition.name, group)
    if group.state is GroupState.PENDING:
        partition.index.leave(group)
        if partition.training and reborn_at_claim(partition.staleness, state.step, group.born):
            group.born = state.step
        attempt, indices = group.take(limit, claim_id)
        group.started_at = at.now
        partition.index.enter(group)
    else:
        attempt, indices = group.take(limit, claim_id)
        partition.index.work_changed(group)
    made = Claim(ClaimToken(claim_id, attempt), partition.name, group, worker_id, set(indices))
    state.claims.open(made, at.now + state.config.lease_times.claim)
    partition.log(GroupEventKind.STARTED, group, at, trajectories=len(indices))
    return made
