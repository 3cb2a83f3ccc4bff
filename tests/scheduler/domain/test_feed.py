"""What policies see of a run's events."""

import pytest

from services.scheduler.domain import events, group_events
from services.scheduler.domain.feed import PolicyFeed
from services.scheduler.policies import types
from tests.scheduler.policies.drive import configured

CONFIG = configured()


def read(*happened: events.Happening) -> list[types.Event]:
    """What a policy sees of these, one a second."""
    feed = PolicyFeed(CONFIG)
    return [seen for at, event in enumerate(happened) for seen in feed.read(event, float(at))]


def test_a_mini_batch_is_starvation_then_training_until_the_next_is_asked_for() -> None:
    """A policy that learns the time of a mini-batch from the wait for it would take idleness for work."""
    seen = read(
        events.StepBegan(1),
        events.MiniBatchBegan(1, 0, 5),
        events.MiniBatchEnded(1, 0, 2.5, 100),
        events.MiniBatchBegan(1, 1, 9),
        events.MiniBatchEnded(1, 1, 0.0),
        events.StepEnded(1),
    )
    assert seen == [
        types.StepBegan(at=0.0, step=1),
        types.StarvationBegan(at=1.0, step=1, mini_batch=0, sampleable=5),
        types.StarvationEnded(at=2.0, step=1, mini_batch=0, wait_s=2.5),
        types.MiniBatchBegan(at=2.0, step=1, mini_batch=0),
        types.MiniBatchEnded(at=3.0, step=1, mini_batch=0, tokens=100),
        types.StarvationBegan(at=3.0, step=1, mini_batch=1, sampleable=9),
        types.StarvationEnded(at=4.0, step=1, mini_batch=1, wait_s=0.0),
        types.MiniBatchBegan(at=4.0, step=1, mini_batch=1),
        types.MiniBatchEnded(at=5.0, step=1, mini_batch=1),
        types.StepEnded(at=5.0, step=1),
    ]


def test_a_new_opening_forgets_the_mini_batch_in_training() -> None:
    """A trainer that crashed while training did not train until its successor came."""
    seen = read(events.MiniBatchEnded(1, 0, 0.0), events.RunOpened(2, 0, "{}"), events.StepEnded(1))
    assert [type(event) for event in seen] == [
        types.StarvationEnded,
        types.MiniBatchBegan,
        types.RunOpened,
        types.StepEnded,
    ]


def test_a_changed_configuration_reaches_the_policy() -> None:
    """UpdateRun would otherwise change what GetRun says and nothing else."""
    assert read(events.RunUpdated("{}")) == [types.RunOpened(at=0.0, config=CONFIG, goes_on=True)]


def test_costs_depth_groups_and_topology_are_told_as_they_are() -> None:
    """Each is what a decision rests on; a field mixed up here is a wrong decision everywhere."""
    seen = read(
        events.DepthObserved(2, 7, 3, 1),
        events.LendDone("x", events.LendKind.INIT, 4.0, counted=False),
        events.ReclaimDone(5.0, counted=True),
        events.SyncDone(hybrid=False, seconds=6.0, weight_version=1),
        group_events.GroupsAdded(("g", "h"), 2, (8, 4)),
        events.TopologyChanged(1, 2, 3, 4),
    )
    assert seen == [
        types.DepthObserved(at=0.0, step=2, sampleable=7, in_flight=3, unpaid_credits=1),
        types.LendDone(at=1.0, cost_s=4.0, counted=False),
        types.ReclaimDone(at=2.0, cost_s=5.0),
        types.SyncDone(at=3.0, cost_s=6.0),
        types.GroupsAdded(
            at=4.0, step=2, groups=(types.NewGroup(group="g", size=8), types.NewGroup(group="h", size=4))
        ),
        types.TopologyChanged(at=5.0, hybrid_replicas=1, standalone_replicas=2, hybrid_gpus=3, standalone_gpus=4),
    ]


def test_the_pool_of_a_group_is_left_out_when_nobody_knows_it() -> None:
    """A guess would teach a policy the wrong speed of a pool."""
    pools = [
        event.pool
        for known in (True, False, None)
        for event in read(group_events.GroupFinished("g", (1, 2), 1, known))
        if isinstance(event, types.GroupFinished)
    ]
    assert pools == [types.Pool.HYBRID, types.Pool.STANDALONE, None]
    assert read(group_events.GroupLeft("g", group_events.GroupExit.FAILED)) == [
        types.GroupFinished(at=0.0, group="g", lengths=(), failed=True)
    ]


def test_a_request_that_runs_nowhere_is_told_without_a_pool() -> None:
    """Left out, a parked request would seem to have ended; as standalone, it would count as running there."""
    progress = events.RequestProgress(
        (
            events.RunningRequest("g", 0, 50, "r", on_hybrid=True),
            events.RunningRequest("g", 1, 10, "", on_hybrid=None),
        ),
        0.9,
    )
    (seen,) = read(progress)
    assert isinstance(seen, types.RequestProgress)
    assert seen.covered_share == 0.9
    assert seen.requests == (
        types.RequestState(key=types.RequestKey("g", 0), tokens=50, replica="r", pool=types.Pool.HYBRID),
        types.RequestState(key=types.RequestKey("g", 1), tokens=10, replica="", pool=None),
    )


def test_a_trajectory_that_finished_reaches_the_policy_at_once_with_its_length() -> None:
    """Between two readings a policy would otherwise take members that are done for running ones."""
    _, first, second = read(
        events.RequestProgress((), 0.97),
        group_events.TrajectoryFinished("g", 3, 700, "r", on_hybrid=True),
        group_events.TrajectoryFinished("g", 4, 800, "", on_hybrid=None),
    )
    assert first == types.RequestProgress(
        at=1.0,
        requests=(
            types.RequestState(
                key=types.RequestKey("g", 3), tokens=700, replica="r", pool=types.Pool.HYBRID, finished=True
            ),
        ),
        covered_share=0.97,
    )
    assert isinstance(second, types.RequestProgress)
    assert [state.pool for state in second.requests] == [None]


def test_counters_of_a_replica_of_neither_pool_are_no_standalone_ones() -> None:
    """A colocated replica, taken for a standalone one, would promise arrivals that the trainer never gets."""
    reading = events.ReplicaReading("c", None, 10, 600, 2.0, 3, events.RouteState.SERVING)
    assert read(events.ReplicaCounters((reading,))) == []


def test_the_prefill_rate_follows_an_engine_that_slows_down() -> None:
    """The mean over an engine's life hardly moves any more after a day."""
    serving = events.RouteState.SERVING
    tokens, seconds, readings = 0, 0.0, []
    for rate in [1000] * 100 + [250] * 30:
        tokens, seconds = tokens + 1000, seconds + 1000 / rate
        readings.append(events.ReplicaCounters((events.ReplicaReading("a", False, 0, tokens, seconds, 1, serving),)))
    restarted = events.ReplicaCounters((events.ReplicaReading("a", False, 0, 50, 0.2, 1, serving),))
    seen = [event for event in read(*readings, restarted) if isinstance(event, types.ReplicaCounters)]
    rates = [event.prefill_tokens_per_s for event in seen]
    assert rates[99] == pytest.approx(1000.0)
    assert rates[129] == pytest.approx(250.0, rel=0.15)
    assert rates[130] == pytest.approx(rates[129], rel=0.05)


def test_counters_give_a_prefill_rate_only_once_something_was_prefilled() -> None:
    """0 tokens in 0 seconds is no rate."""
    out, serving = events.RouteState.OUT, events.RouteState.SERVING
    seen = read(
        events.ReplicaCounters(
            (
                events.ReplicaReading("a", True, 10, 600, 2.0, 3, serving),
                events.ReplicaReading("b", False, 0, 0, 0.0, 0, out),
            )
        )
    )
    rates = [event.prefill_tokens_per_s for event in seen if isinstance(event, types.ReplicaCounters)]
    assert rates == [300.0, None]


def test_what_a_policy_has_no_word_for_is_left_out() -> None:
    """An event that only people read must not become one that a policy stumbles over."""
    assert (
        read(
            events.Saved(1, "c"),
            events.StarvationBegan(1),
            events.ModeChanged(events.Mode.TRAINER, events.Mode.LENDING, "x"),
            events.SyncDone(hybrid=True, seconds=1.0, weight_version=1),
            group_events.GroupLeft("g", group_events.GroupExit.COMMITTED),
        )
        == []
    )
