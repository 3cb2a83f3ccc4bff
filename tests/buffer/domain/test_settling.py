"""How trajectories and groups settle, and how work is handed out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from services.buffer.domain import results
from services.buffer.domain.claims import ClaimToken
from services.buffer.domain.config import LeaseTimes, Strategy
from services.buffer.domain.events import GroupEventKind
from services.buffer.domain.expiry import expire, expired, next_expiry
from services.buffer.domain.group import GroupState
from services.buffer.domain.results import Failure, FailureKind, Progress
from services.buffer.domain.trajectory import TrajectoryState
from services.buffer.wire.outputs import partial_from, same_outputs
from services.runtime.errors import Code, TurnoutError
from tests.buffer.domain.model import World, config, output, result, settle
from turnout.buffer.v1 import buffer_pb2 as pb


def reason(call: Callable[[], object]) -> str:
    with pytest.raises(TurnoutError) as caught:
        call()
    return caught.value.reason


def kinds(world: World) -> list[str]:
    return [event.kind.name for event in world.run.state.events.read(1, 1000)]


def test_a_group_finishes_with_its_last_trajectory() -> None:
    world = World()
    world.add("g", size=2)
    [claim] = world.claim(2)
    assert (claim.token.attempt, sorted(claim.open)) == (1, [0, 1])
    world.finish(claim, index=1)
    assert world.partition.index.counts.running == 1
    world.finish(claim, index=0)
    assert world.partition.index.counts.finished == 1
    assert len(world.run.state.claims) == 0, "a settled claim is gone"
    assert kinds(world) == ["ADDED", "STARTED", "TRAJECTORY_FINISHED", "TRAJECTORY_FINISHED", "FINISHED"]


def test_a_caller_with_its_own_queue_needs_no_token() -> None:
    world = World()
    world.finish_new("g", rewards=(0.0, 1.0))
    assert world.depth() == 1


def test_a_token_is_needed_once_there_was_a_claim() -> None:
    world = World(config(max_attempts=2))
    world.add("g")
    [claim] = world.claim()
    bare = result("g", 0, (output(),))
    assert reason(lambda: settle(world.partition, bare, world.at)) == "STALE_CLAIM"
    world.fail(claim)
    assert reason(lambda: settle(world.partition, bare, world.at)) == "STALE_CLAIM"
    for token in (claim.token, ClaimToken(claim.token.claim_id, 2), ClaimToken("nope", 1)):
        late = result("g", 0, (output(),), token)
        assert reason(partial(settle, world.partition, late, world.at)) == "STALE_CLAIM"


def test_unclaimed_trajectories_can_fail_too() -> None:
    world = World(config(max_attempts=2, size=2))
    world.add("g")
    failure = Failure("g", 0, FailureKind.RETRYABLE)
    results.fail(world.partition, failure, world.at)
    group = world.partition.groups["g"]
    assert (group.state, group.pending, group.trajectories[0].attempt) == (GroupState.PENDING, 2, 2)
    [first, second] = world.claim(2)
    assert (first.token.attempt, first.open) == (2, {0}), "one claim holds one attempt only"
    assert (second.token.attempt, second.open) == (1, {1})


def test_an_equal_result_is_fine_as_long_as_the_group_is_there() -> None:
    """A worker that repeats a torn batch must not be told that its work is lost."""
    world = World()
    world.add("g", size=2)
    [claim] = world.claim(2)
    same = result("g", 0, (output(),), claim.token)
    other = result("g", 0, (output(9.0),), claim.token)
    settle(world.partition, same, world.at)
    settle(world.partition, same, world.at)
    assert reason(lambda: settle(world.partition, other, world.at)) == "TRAJECTORY_SETTLED"
    world.finish(claim, index=1)
    settle(world.partition, same, world.at)
    assert world.partition.groups["g"].finished == 2
    assert world.sample(1) is not None
    settle(world.partition, same, world.at)
    assert reason(lambda: settle(world.partition, other, world.at)) == "GROUP_SAMPLED"


def test_a_failure_that_cannot_be_retried_fails_the_group_at_once() -> None:
    world = World(config(max_attempts=5, size=3))
    world.add("g")
    claims = [*world.claim(1), *world.claim(1), *world.claim(1)]
    world.finish(claims[0])
    world.fail(claims[1], FailureKind.PERMANENT, error="bad prompt")
    group = world.partition.groups["g"]
    assert (group.state, group.error) == (GroupState.FAILED, "bad prompt")
    assert [trajectory.state for trajectory in group.trajectories] == [
        TrajectoryState.FINISHED,
        TrajectoryState.FAILED,
        TrajectoryState.FAILED,
    ]
    late = result("g", 2, (output(),), claims[2].token)
    assert reason(lambda: settle(world.partition, late, world.at)) == "GROUP_FAILED"
    assert reason(lambda: world.run.renew_claim(claims[2].token, world.at)) == "STALE_CLAIM"
    same = result("g", 0, (output(),), claims[0].token)
    settle(world.partition, same, world.at)
    other = result("g", 0, (output(3.0),), claims[0].token)
    assert reason(lambda: settle(world.partition, other, world.at)) == "GROUP_FAILED"


def test_the_kind_of_a_failure_must_be_said() -> None:
    world = World()
    world.add("g")
    [claim] = world.claim()
    vague = Failure("g", 0, None, claim.token)
    assert reason(lambda: results.fail(world.partition, vague, world.at)) == "KIND_UNSPECIFIED"
    assert world.run.state.claims.get(claim.token.claim_id) is claim


def test_a_finished_trajectory_cannot_fail() -> None:
    world = World()
    world.finish_new("g", rewards=(0.0, 1.0))
    failure = Failure("g", 0, FailureKind.PERMANENT)
    assert reason(lambda: results.fail(world.partition, failure, world.at)) == "TRAJECTORY_SETTLED"


def test_interruptions_use_up_no_attempt() -> None:
    """A reclaim of the GPUs is no fault of the prompt; it must not fail after a few of them."""
    world = World()
    world.add("g")
    for attempt in range(1, 6):
        [claim] = world.claim()
        assert claim.token.attempt == attempt
        world.fail(claim, FailureKind.INTERRUPTED)
    trajectory = world.partition.groups["g"].trajectories[0]
    assert (trajectory.attempt, trajectory.failures) == (6, 0)
    [claim] = world.claim()
    world.fail(claim, FailureKind.RETRYABLE)
    assert world.partition.groups["g"].state is GroupState.FAILED


def test_an_expired_claim_is_a_failed_attempt_of_its_open_trajectories() -> None:
    world = World(config(max_attempts=2, size=3, lease_times=LeaseTimes(claim=10.0)))
    world.add("g")
    [claim] = world.claim(3)
    world.finish(claim, index=0)
    world.now = 9.0
    world.run.renew_claim(claim.token, world.at)
    assert next_expiry(world.run) == 19.0
    world.now = 18.0
    assert expire(world.run, expired(world.run, world.at), world.at) == []
    world.now = 19.0
    assert expire(world.run, expired(world.run, world.at), world.at) == [world.partition]
    group = world.partition.groups["g"]
    assert (group.state, group.pending, group.finished) == (GroupState.RUNNING, 2, 1)
    assert [trajectory.attempt for trajectory in group.trajectories] == [1, 2, 2]
    assert [trajectory.failures for trajectory in group.trajectories] == [0, 1, 1]
    [claim] = world.claim(3)
    world.now = 40.0
    expire(world.run, expired(world.run, world.at), world.at)
    assert group.state is GroupState.FAILED
    assert group.error == "the claim expired"


def test_partial_output_is_handed_on_and_replaced() -> None:
    world = World()
    world.add("g")
    begun, continued = (
        pb.Segment(tokens=tokens, weight_version=version, end=pb.SEGMENT_END_CONTINUED)
        for tokens, version in ((5, 2), (7, 4))
    )
    first, second = pb.Output(segments=[begun]), pb.Output(segments=[begun, continued])
    for kept in (first, second, None):
        [claim] = world.claim()
        world.fail(claim, FailureKind.INTERRUPTED, [kept] if kept else [])
    group = world.partition.groups["g"]
    there, expected = group.trajectories[0].partial, partial_from([second], "g", 0)
    assert there is not None
    assert expected is not None
    same = same_outputs(0, there.encoded, there.payloads, expected)
    assert same, "an attempt without output leaves what there was"
    assert (group.state, group.has_partials) == (GroupState.RUNNING, True)
    [claim] = world.claim()
    world.finish(claim)
    assert not group.trajectories[0].partial
    assert not group.has_partials


def test_partial_payloads_are_kept_and_let_go() -> None:
    """Bytes of an attempt that was superseded must not stay for ever."""
    world = World(config(size=2))
    world.add("g")
    for text in (b"one", b"three"):
        claims = world.claim(1)
        world.fail(claims[0], FailureKind.INTERRUPTED, [output(payload=text)])
        assert world.run.state.payloads.held == len(text)
    [claim] = world.claim(1)
    world.fail(claim, FailureKind.PERMANENT)
    assert (world.run.state.payloads.held, len(world.store)) == (0, 0)


def test_a_partial_is_dropped_where_partial_rollout_is_off() -> None:
    world = World(config(partial_rollout=False))
    world.add("g", step=1)
    [claim] = world.claim()
    world.run.contact(world.at, 4)
    world.fail(claim, FailureKind.INTERRUPTED, [output(tokens=100)])
    group = world.partition.groups["g"]
    assert (group.state, group.born, group.trajectories[0].partial) == (GroupState.PENDING, 4, None)


def test_a_group_is_born_again_only_if_wholly_reissued() -> None:
    """With a sibling running, finished or continued, the group still holds output of its first step."""
    for leave in ("running", "finished", "partial"):
        world = World(config(size=2))
        world.add("g", step=1)
        first, second = *world.claim(1), *world.claim(1)
        if leave == "finished":
            world.finish(second)
        if leave == "partial":
            world.fail(second, FailureKind.INTERRUPTED, [output()])
        world.run.contact(world.at, 4)
        world.fail(first, FailureKind.INTERRUPTED)
        assert world.partition.groups["g"].born == 1, leave


def test_a_partial_must_be_continuable() -> None:
    world = World()
    world.add("g")
    [claim] = world.claim()
    aborted = pb.Output(segments=[pb.Segment(tokens=5, end=pb.SEGMENT_END_ABORTED)])
    assert reason(lambda: world.fail(claim, FailureKind.INTERRUPTED, [aborted])) == "ABORTED_SEGMENT"


def test_finish_group_closes_with_what_is_there() -> None:
    world = World(config(size=3))
    world.add("g")
    assert reason(lambda: results.finish_group(world.partition, "g", world.at)) == "NOTHING_FINISHED"
    claims = [*world.claim(1), *world.claim(1), *world.claim(1)]
    world.finish(claims[0])
    world.fail(claims[1], FailureKind.INTERRUPTED, [output(payload=b"half")])
    assert [results.finish_group(world.partition, "g", world.at) for _ in range(2)] == [1, 1]
    assert world.depth() == 1
    assert (len(world.run.state.claims), world.run.state.payloads.held) == (0, 0)
    late = result("g", 2, (output(),), claims[2].token)
    assert reason(lambda: settle(world.partition, late, world.at)) == "TRAJECTORY_FAILED"
    world.sample(1)
    assert reason(lambda: results.finish_group(world.partition, "g", world.at)) == "GROUP_SAMPLED"
    assert reason(lambda: results.fail_group(world.partition, "g", "no", world.at)) == "GROUP_SAMPLED"


def test_fail_group_fails_whatever_the_trajectories_did() -> None:
    world = World()
    world.finish_new("g")
    results.fail_group(world.partition, "g", "unscorable", world.at)
    results.fail_group(world.partition, "g", "again", world.at)
    group = world.partition.groups["g"]
    assert (group.state, group.error, world.depth()) == (GroupState.FAILED, "unscorable", 0)
    assert reason(lambda: results.finish_group(world.partition, "g", world.at)) == "GROUP_FAILED"
    assert reason(lambda: results.fail_group(world.partition, "nope", "", world.at)) == "GROUP_NOT_FOUND"


def test_the_filter_needs_its_reward_on_every_output() -> None:
    world = World(config(group_filter_metric="acc"))
    world.add("g")
    assert reason(lambda: settle(world.partition, result("g", 0, (output(),)), world.at)) == "REWARD_MISSING"
    assert world.partition.groups["g"].state is GroupState.PENDING
    validation = World(config(group_filter_metric="acc"), "val")
    validation.add("g")
    settle(validation.partition, result("g", 0, (output(),)), validation.at)


def test_progress_is_noted_for_running_trajectories_alone() -> None:
    world = World()
    world.add("g")
    [claim] = world.claim()
    event = results.report_progress(
        world.partition, Progress("g", 0, 40, None, claim.token, engine_request_id="req"), world.at
    )
    assert (event.sequence, event.kind, event.done, event.attempt) == (0, GroupEventKind.PROGRESS, 40, 1)
    assert event.engine_request_id == "req"
    assert world.partition.groups["g"].trajectories[0].done == 40
    assert kinds(world) == ["ADDED", "STARTED"], "progress is never kept"
    for wrong in (Progress("g", 0, -1, None, claim.token), Progress("g", 0, 1, -1, claim.token)):
        assert reason(partial(results.report_progress, world.partition, wrong, world.at)) == "OUT_OF_RANGE"
    assert reason(lambda: results.report_progress(world.partition, Progress("g", 0, 1), world.at)) == "STALE_CLAIM"
    world.finish(claim)
    late = Progress("g", 0, 41, None, claim.token)
    assert reason(lambda: results.report_progress(world.partition, late, world.at)) == "TRAJECTORY_SETTLED"


@pytest.mark.parametrize("index", [-1, 1])
def test_an_index_outside_the_group_is_refused(index: int) -> None:
    world = World()
    world.add("g")
    with pytest.raises(TurnoutError) as caught:
        settle(world.partition, result("g", index, (output(),)), world.at)
    assert (caught.value.code, caught.value.reason) == (Code.INVALID_ARGUMENT, "INDEX_OUT_OF_RANGE")


def test_claims_take_the_oldest_first_and_continue_before_they_begin() -> None:
    world = World(config(size=2))
    world.add("new", step=5)
    world.add("old", step=3)
    first, second = world.claim(3)
    assert [(claim.group.group_id, sorted(claim.open)) for claim in (first, second)] == [("old", [0, 1]), ("new", [0])]
    world.fail(first, FailureKind.INTERRUPTED, [output()])
    [claim] = world.claim(1)
    assert (claim.group.group_id, claim.token.attempt) == ("old", 2)
    assert sorted(claim.open) == [0]


def test_an_unclaimed_finish_is_not_handed_out_again() -> None:
    world = World(config(size=3))
    world.add("g")
    settle(world.partition, result("g", 1, (output(),)), world.at)
    [claim] = world.claim(5)
    assert sorted(claim.open) == [0, 2]
    assert world.claim(5) == []


def test_the_gate_lets_started_groups_pass() -> None:
    """A re-issued trajectory behind a closed gate would keep the gate closed for ever."""
    world = World(config(max_versions=1, strategy=Strategy.GATE, train_batch_size=2))
    world.add("a", "b", "c")
    claims = world.claim(5)
    assert [claim.group.group_id for claim in claims] == ["a", "b"]
    world.fail(claims[0], FailureKind.INTERRUPTED, [output()])
    world.finish(claims[1])
    [claim] = world.claim(5)
    assert claim.group.group_id == "a"
    world.finish(claim)
    assert world.claim(5) == []
    assert world.sample(1) is not None
    assert [claim.group.group_id for claim in world.claim(5)] == ["c"]


def test_an_old_group_that_nobody_started_is_born_again_under_wait() -> None:
    """Otherwise a prompt that waited long for a worker would hold sampling as soon as one takes it."""
    world = World(config(max_versions=2, strategy=Strategy.WAIT))
    world.add("g", step=1)
    world.run.contact(world.at, 2)
    assert world.partition.depth(2, 0.0).hold is None, "what nobody started does not hold"
    [claim] = world.claim()
    assert claim.group.born == 2
    world.add("h", step=2)
    [claim] = world.claim()
    assert claim.group.born == 2
    hold = world.partition.depth(3, 0.0).hold
    assert hold is not None
    assert (hold.group_id, hold.span) == ("g", 2)
