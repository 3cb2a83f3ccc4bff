"""Commands: requests carried out on a run, by the servicer as they come and by a replay as they came.

Invariant: what a command does and answers follows from the run, the request and the moment alone.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from services.buffer.domain import results, work
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import Partition
from services.buffer.domain.run import Run
from services.buffer.wire.groups import failure_from, outcome_to, result_from, spec_from
from services.buffer.wire.outputs import same_outputs
from services.runtime.errors import TurnoutError, require_id
from turnout.buffer.storage.v1 import storage_pb2 as st
from turnout.buffer.v1 import buffer_pb2 as pb

M = TypeVar("M")


def each(items: Iterable[M], apply: Callable[[M], None]) -> list[pb.ItemOutcome]:
    """Apply a batch item by item; a bad item leaves the others alone."""
    outcomes: list[pb.ItemOutcome] = []
    for item in items:
        try:
            apply(item)
            outcomes.append(outcome_to(None))
        except TurnoutError as error:
            outcomes.append(outcome_to(error))
    return outcomes


def add_groups(run: Run, request: pb.AddGroupsRequest, at: Moment) -> pb.AddGroupsResponse:
    """Admit prompts, all or none."""
    specs = [spec_from(group, position) for position, group in enumerate(request.groups)]
    remaining = run.add_groups(
        run.partition(request.partition),
        specs,
        request.step,
        at,
        refill_claim_id=request.refill_claim_id if request.HasField("refill_claim_id") else None,
        end_of_prompts=request.end_of_prompts,
    )
    return pb.AddGroupsResponse(added=len(specs), refill_remaining=remaining)


def claim(partition: Partition, said: st.Claim, at: Moment) -> tuple[str, ...]:
    """Hand out again what was handed out; returns the ids of the claims."""
    groups = ((partition.require(take.group_id), take.limit) for take in said.takes)
    claims = [work.claim(partition, group, said.worker_id, limit, at) for group, limit in groups]
    return tuple(claim.token.claim_id for claim in claims)


def finish(partition: Partition, items: Iterable[pb.TrajectoryResult], at: Moment) -> list[pb.ItemOutcome]:
    """Settle trajectories with their results."""

    def settle(item: pb.TrajectoryResult) -> None:
        result = result_from(item)
        try:
            results.finish(partition, result, at, same_outputs)
        except TurnoutError as error:
            results.refused(partition, result.outputs, error)
            raise

    return each(items, settle)


def fail(run: Run, request: pb.FailTrajectoriesRequest, at: Moment) -> pb.FailTrajectoriesResponse:
    """Settle failed attempts."""
    partition = run.partition(request.partition)

    def settle(item: pb.TrajectoryFailure) -> None:
        failure = failure_from(item)
        try:
            results.fail(partition, failure, at)
        except TurnoutError as error:
            results.refused(partition, failure.partial, error)
            raise

    outcomes = each(request.failures, settle)
    return pb.FailTrajectoriesResponse(outcomes=outcomes)


def finish_group(run: Run, request: pb.FinishGroupRequest, at: Moment) -> pb.FinishGroupResponse:
    """Close a group with the trajectories it has."""
    finished = results.finish_group(run.partition(request.partition), request.group_id, at)
    return pb.FinishGroupResponse(finished_trajectories=finished)


def fail_group(run: Run, request: pb.FailGroupRequest, at: Moment) -> pb.FailGroupResponse:
    """Fail a whole group."""
    results.fail_group(run.partition(request.partition), request.group_id, request.error, at)
    return pb.FailGroupResponse()


def evict_groups(run: Run, request: pb.EvictGroupsRequest, at: Moment) -> pb.EvictGroupsResponse:
    """Remove groups on the caller's order; those of a partition that does not exist are missing, like any other."""
    for position, group_id in enumerate(request.group_ids):
        require_id(f"group_ids[{position}]", group_id)
    partition = run.partitions.get(request.partition)
    if partition is None:
        return pb.EvictGroupsResponse(missing=len(set(request.group_ids)))
    counts = run.evict_groups(partition, request.group_ids, refill=request.refill, at=at)
    return pb.EvictGroupsResponse(evicted=counts.evicted, missing=counts.missing, sampled=counts.sampled)


def set_intake(run: Run, request: pb.SetIntakeRequest) -> pb.SetIntakeResponse:
    """Pause or resume the intake of a partition."""
    partition = run.partition(request.partition)
    before, partition.intake_paused = partition.intake_paused, request.paused
    return pb.SetIntakeResponse(was_paused=before)


def decline_refill(run: Run, request: pb.DeclineRefillRequest) -> pb.DeclineRefillResponse:
    """Cancel the credits of a refill claim and end supply."""
    cancelled = run.decline_refill(run.partition(request.partition), request.refill_claim_id)
    return pb.DeclineRefillResponse(cancelled=cancelled)
