"""Results: how trajectories and groups settle.

Invariants: a trajectory settles once, and only in the hands of its present claim or, if it was never claimed, of a
caller without a token; a group finishes when its last trajectory does, and fails at once when one fails for good. A
retried failure makes only that trajectory pending again; the group is born again only if it is then wholly re-issued:
nothing runs, nothing finished and no partial output is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from services.buffer.domain.claims import Claim, ClaimToken, stale_claim
from services.buffer.domain.events import GroupEvent, GroupEventKind
from services.buffer.domain.group import Group, GroupState
from services.buffer.domain.moment import Moment
from services.buffer.domain.outputs import InlinePayload, Outputs, Payload
from services.buffer.domain.partition import Partition
from services.buffer.domain.trajectory import Trajectory, TrajectoryState, cut_error
from services.runtime.errors import TurnoutError, already_exists, failed_precondition, invalid_argument, require_id

Same: TypeAlias = Callable[[int, bytes, Sequence[tuple[int, Payload | InlinePayload]], Outputs], bool]
"""Whether the outputs of a trajectory, given by index, among the encoded ones of its group, and their payloads are what
is offered. It is for those who know the encoding to say."""


# Refusals that no change to a result and no second try will mend.
_FOR_GOOD = frozenset(
    {"GROUP_NOT_FOUND", "STALE_CLAIM", "GROUP_SAMPLED", "GROUP_FAILED", "TRAJECTORY_FAILED", "TRAJECTORY_SETTLED"}
)


@dataclass(slots=True)
class Result:
    """What one trajectory produced. Not frozen, for the reason given in `outputs`."""

    group_id: str
    index: int
    outputs: Outputs
    token: ClaimToken | None = None


class FailureKind(Enum):
    """What a failure means for the next attempt; the numbers are those of the wire."""

    RETRYABLE = 1
    PERMANENT = 2
    INTERRUPTED = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt; `kind` None was not said and is refused."""

    group_id: str
    index: int
    kind: FailureKind | None
    token: ClaimToken | None = None
    error: str = ""
    partial: Outputs | None = None


def finish(partition: Partition, result: Result, at: Moment, same: Same) -> None:
    """Settle a trajectory with its result; the same result again has no effect."""
    group, trajectory = _find(partition, result.group_id, result.index)
    outputs = result.outputs
    if partition.filter_metric is not None:
        _check_metric(partition.filter_metric, outputs)
    if trajectory.state is TrajectoryState.FINISHED:
        if _is_same(group, trajectory, result, same):
            # The same bytes, perhaps put a second time under another id.
            partition.state.payloads.refuse(outputs)
            return
        raise _settled(group, result.index)
    _check_open(group, trajectory, result.token)
    payloads = partition.state.payloads
    payloads.check_outputs("outputs", outputs)

    partition.state.touch(partition.name, group)
    payloads.keep_outputs(outputs)
    if trajectory.partial is not None:
        payloads.drop(trajectory.partial.kept())
    started = group.state is GroupState.PENDING
    if started:
        partition.index.leave(group)
        group.started_at = at.now
    if trajectory.state is TrajectoryState.RUNNING:
        partition.state.claims.release(trajectory.claim_id, result.index)
    group.settle(result.index, outputs)
    if started:
        partition.index.enter(group)
    else:
        partition.index.work_changed(group)
    partition.log(
        GroupEventKind.TRAJECTORY_FINISHED,
        group,
        at,
        index=result.index,
        lengths=(outputs.length,),
        replica_id=outputs.replica_id,
        attempt=trajectory.attempt,
    )
    if group.finished == group.size:
        _finish_group(partition, group, at)


def refused(partition: Partition, outputs: Outputs | None, error: TurnoutError) -> None:
    """A result or partial output was refused; if that is for good, its payloads in external stores may go."""
    if outputs is not None and error.reason in _FOR_GOOD:
        partition.state.payloads.refuse(outputs)


def fail(partition: Partition, failure: Failure, at: Moment) -> None:
    """Report a failed attempt."""
    group, trajectory = _find(partition, failure.group_id, failure.index)
    if failure.kind is None:
        raise invalid_argument("kind", "the kind of a failure must be said", reason="KIND_UNSPECIFIED")
    if trajectory.state is TrajectoryState.FINISHED:
        raise _settled(group, failure.index)
    _check_open(group, trajectory, failure.token)
    if failure.partial is not None:
        partition.state.payloads.check_outputs("partial.outputs", failure.partial)
    _lose_attempt(partition, group, failure, at)
    if failure.partial is not None:
        # Unless it was kept.
        partition.state.payloads.refuse(failure.partial)


def expire(partition: Partition, claim: Claim, at: Moment) -> None:
    """A claim ended with trajectories open: each is a retryable failure without partial output."""
    for index in sorted(claim.open):
        if claim.group.live:
            failure = Failure(
                claim.group.group_id, index, FailureKind.RETRYABLE, claim.token, error="the claim expired"
            )
            _lose_attempt(partition, claim.group, failure, at)


def finish_group(partition: Partition, group_id: str, at: Moment) -> int:
    """Close a group with the trajectories it has; returns how many those are."""
    group = _find_group(partition, group_id)
    _check_not_sampled(group)
    if group.state is GroupState.FAILED:
        raise _group_failed(group)
    if not group.finished:
        raise failed_precondition(
            "NOTHING_FINISHED", "not one trajectory of the group is finished", field="group_id", value=group_id
        )
    if group.live:
        _finish_group(partition, group, at)
    return group.finished


def fail_group(partition: Partition, group_id: str, error: str, at: Moment) -> None:
    """Fail a whole group at once, whatever its trajectories did."""
    group = _find_group(partition, group_id)
    _check_not_sampled(group)
    if group.state is not GroupState.FAILED:
        _fail_group(partition, group, cut_error(error), at)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running trajectory is, in its unit."""

    group_id: str
    index: int
    done: int
    total: int | None = None
    token: ClaimToken | None = None
    engine_request_id: str = ""


def report_progress(partition: Partition, progress: Progress, at: Moment) -> GroupEvent:
    """Note how far a running trajectory is; returns what its watchers are told."""
    group, trajectory = _find(partition, progress.group_id, progress.index)
    for name, value in (("done", progress.done), ("total", progress.total)):
        if value is not None and value < 0:
            raise invalid_argument(name, f"{name} must not be negative", value=value, reason="OUT_OF_RANGE")
    if trajectory.state is TrajectoryState.FINISHED:
        raise _settled(group, progress.index)
    _check_open(group, trajectory, progress.token)
    trajectory.done = progress.done
    return GroupEvent(
        0,
        at.wall,
        GroupEventKind.PROGRESS,
        partition.name,
        group.group_id,
        group.born,
        index=progress.index,
        attempt=trajectory.attempt,
        done=progress.done,
        engine_request_id=progress.engine_request_id,
    )


def _find_group(partition: Partition, group_id: str) -> Group:
    group = partition.groups.get(group_id)
    if group is None:
        # An id that cannot be one is told from one that is not there; this is off the path of every result.
        require_id("group_id", group_id)
        return partition.require(group_id)
    return group


def _find(partition: Partition, group_id: str, index: int) -> tuple[Group, Trajectory]:
    group = _find_group(partition, group_id)
    if not 0 <= index < group.size:
        message = f"the group has trajectories 0 to {group.size - 1}"
        raise invalid_argument("index", message, value=index, reason="INDEX_OUT_OF_RANGE", group_id=group_id)
    return group, group.trajectory(index)


def _is_same(group: Group, trajectory: Trajectory, result: Result, same: Same) -> bool:
    kept = trajectory.outputs
    if kept is not None:
        return same(result.index, kept.encoded, kept.payloads, result.outputs)
    placed = [(position, payload) for index, position, payload in group.placed if index == result.index]
    return same(result.index, group.results, placed, result.outputs)


def _check_metric(metric: str, outputs: Outputs) -> None:
    for position, rewards in enumerate(outputs.rewards):
        if metric not in rewards:
            message = f"the group filter needs the reward {metric!r} on every output"
            raise invalid_argument(f"outputs[{position}].rewards", message, value=metric, reason="REWARD_MISSING")


def _settled(group: Group, index: int) -> TurnoutError:
    """Another word on a trajectory that has finished."""
    if group.state is GroupState.SAMPLED:
        return _group_sampled(group)
    if group.state is GroupState.FAILED:
        return _group_failed(group)
    message = "the trajectory has finished, and this is not the result it finished with"
    return already_exists("TRAJECTORY_SETTLED", message, field="index", group_id=group.group_id, value=index)


def _group_sampled(group: Group) -> TurnoutError:
    return failed_precondition("GROUP_SAMPLED", "Sample holds the group", field="group_id", value=group.group_id)


def _check_not_sampled(group: Group) -> None:
    if group.state is GroupState.SAMPLED:
        raise _group_sampled(group)


def _group_failed(group: Group) -> TurnoutError:
    return failed_precondition("GROUP_FAILED", "the group has failed", field="group_id", value=group.group_id)


def _check_open(group: Group, trajectory: Trajectory, token: ClaimToken | None) -> None:
    """Raise unless the trajectory can settle under this token."""
    _check_not_sampled(group)
    if group.state is GroupState.FAILED:
        raise _group_failed(group)
    if trajectory.state is TrajectoryState.FAILED:
        raise failed_precondition(
            "TRAJECTORY_FAILED", "the group was closed without this trajectory", field="group_id", value=group.group_id
        )
    if token is None:
        if trajectory.claim_id:
            raise stale_claim(None)
    elif (
        trajectory.state is not TrajectoryState.RUNNING
        or token.claim_id != trajectory.claim_id
        or token.attempt != trajectory.attempt
    ):
        raise stale_claim(token)


def _lose_attempt(partition: Partition, group: Group, failure: Failure, at: Moment) -> None:
    state = partition.state
    state.touch(partition.name, group)
    trajectory = group.trajectories[failure.index]
    error = cut_error(failure.error)
    uses_attempt = failure.kind is not FailureKind.INTERRUPTED
    if failure.kind is FailureKind.PERMANENT or (uses_attempt and trajectory.failures + 1 >= state.config.max_attempts):
        trajectory.failures += 1
        trajectory.error = error
        _fail_group(partition, group, error, at)
        return
    partial: Outputs | None = None
    if state.config.partial_rollout and failure.partial is not None and failure.partial.length:
        partial = failure.partial
        state.payloads.keep_outputs(partial)
        if trajectory.partial is not None:
            state.payloads.drop(trajectory.partial.kept())
    if trajectory.state is TrajectoryState.RUNNING:
        state.claims.release(trajectory.claim_id, failure.index)
    group.reissue(failure.index, error, uses_attempt=uses_attempt, partial=partial)
    if group.wholly_reissued:
        partition.index.leave(group)
        group.state = GroupState.PENDING
        group.born = state.step
        partition.index.enter(group)
    else:
        partition.index.work_changed(group)
    partition.log(GroupEventKind.REISSUED, group, at, trajectories=1)


def _finish_group(partition: Partition, group: Group, at: Moment) -> None:
    partition.state.touch(partition.name, group)
    partition.end_claims(group)
    _drop_partials(partition, group)
    partition.index.leave(group)
    lengths = tuple([0 if member.outputs is None else member.outputs.length for member in group.members])
    group.finish(partition.filter_metric)
    partition.index.enter(group)
    partition.log(GroupEventKind.FINISHED, group, at, lengths=lengths)


def _fail_group(partition: Partition, group: Group, error: str, at: Moment) -> None:
    partition.state.touch(partition.name, group)
    partition.end_claims(group)
    _drop_partials(partition, group)
    partition.index.leave(group)
    group.fail(error)
    partition.index.enter(group)
    partition.log(GroupEventKind.FAILED, group, at)


def _drop_partials(partition: Partition, group: Group) -> None:
    """The kept output of trajectories that will not be continued any more goes."""
    for trajectory in group.members:
        if trajectory.partial is not None:
            partition.state.payloads.drop(trajectory.partial.kept())
            trajectory.partial = None
