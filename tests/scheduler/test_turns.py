"""Trajectories of several turns, as the engines tell of their requests."""

from __future__ import annotations

from services.scheduler.domain import events, group_events
from services.scheduler.domain.feed import PolicyFeed
from services.scheduler.policies import types
from services.scheduler.policies.jit.inflight import Groups, InFlight
from services.scheduler.readings import requests_of
from services.scheduler.reports import Reports
from services.scheduler.turns import Turns
from tests.scheduler.policies.drive import configured
from turnout.engine.v1 import engine_pb2


def running(
    name: str, tokens: int, trajectory: int = 0, attempt: int = 1, *, prompt: int = 100
) -> engine_pb2.RequestProgress:
    key = engine_pb2.JoinKey(partition="train", group_id="g", trajectory=trajectory, attempt=attempt)
    return engine_pb2.RequestProgress(
        join_key=key, engine_request_id=name, replica_id="r", prompt_tokens=prompt, output_tokens=tokens
    )


def seen(turns: Turns, *requests: engine_pb2.RequestProgress) -> list[int]:
    """The tokens that policies are told of, in the order of the requests."""
    told = requests_of(engine_pb2.ProgressReport(requests=requests, covered_share=1.0), "train", turns, Reports())
    return [request.done for request in told.requests]


def test_tokens_add_over_turns() -> None:
    """A trajectory of ten turns would look as if it had just begun, ten times."""
    turns = Turns()
    assert seen(turns, running("t1", 900)) == [900]
    assert seen(turns, running("t2", 20)) == [920]
    assert seen(turns, running("t2", 300)) == [1200]
    assert seen(turns, running("t3", 10), running("other", 5, trajectory=1)) == [1210, 5]


def test_the_time_of_a_tool_decodes_nothing_and_forgets_nothing() -> None:
    """While a tool runs there is no request: no token is made up for it, and none is lost."""
    turns = Turns()
    assert seen(turns, running("t1", 900)) == [900]
    assert seen(turns) == [], "nothing took a second turn: it has finished"
    assert seen(turns, running("t2", 20)) == [920]
    assert seen(turns) == [920]
    assert seen(turns) == [920]
    assert seen(turns, running("t3", 5)) == [925]


def test_a_trajectory_in_a_tool_call_runs_on_no_replica_until_it_finishes() -> None:
    """Taken for finished it holds its group back no more, and the trainer is told to wait for less than there is."""
    turns = Turns()
    seen(turns, running("t1", 900))
    seen(turns, running("t2", 20), running("u1", 50, trajectory=1))
    report = engine_pb2.ProgressReport(requests=[running("u1", 60, trajectory=1)], covered_share=1.0)
    parked = requests_of(report, "train", turns, Reports()).requests[1]
    assert parked == events.RunningRequest("g", 0, 920, "", None)
    turns.settle("g", 0)
    assert seen(turns, running("u1", 70, trajectory=1)) == [70]
    assert seen(turns, running("t2", 25), running("u1", 70, trajectory=1)) == [925, 70], "a late reading"
    assert seen(turns, running("u1", 80, trajectory=1)) == [80]
    assert seen(turns, running("u2", 1, trajectory=1, attempt=2)) == [1], "the attempt before is gone"
    assert seen(turns) == [1]
    turns.forget("g")
    assert seen(turns) == []


def test_a_request_that_goes_on_elsewhere_is_no_new_turn() -> None:
    """It keeps its output under another id; adding it again would double it at every reclaim."""
    turns = Turns()
    assert seen(turns, running("a", 900)) == [900]
    assert seen(turns, running("", 900)) == [900], "parked"
    assert seen(turns, running("b", 950)) == [950]


def test_a_second_turn_that_is_longer_than_the_first_is_a_turn_of_its_own() -> None:
    """Within one interval it had decoded more, was taken for the first gone elsewhere, and hid what that had made."""
    turns = Turns()
    assert seen(turns, running("t1", 30)) == [30]
    assert seen(turns, running("t2", 50, prompt=140)) == [80]
    assert seen(turns, running("t2-elsewhere", 60, prompt=140)) == [90]
    assert seen(turns, running("t3", 70, prompt=230)) == [160]


def test_requests_of_one_trajectory_at_a_time_do_not_count_each_other() -> None:
    """Two agents of one trajectory, read in any order, must not add up without end."""
    turns = Turns()
    for tokens in (10, 20, 30):
        assert seen(turns, running("x", 5 * tokens), running("y", tokens)) == [5 * tokens, tokens]
    assert seen(turns, running("y", 40)) == [190]


def test_another_attempt_begins_anew_and_a_group_takes_its_turns_with_it() -> None:
    """Output of an attempt that failed is gone; groups come and go by the thousand."""
    turns = Turns()
    seen(turns, running("t1", 900))
    assert seen(turns, running("t2", 20, attempt=2)) == [20]
    turns.forget("g")
    assert seen(turns, running("t9", 7)) == [7]


def test_a_group_that_is_gone_is_not_kept_because_its_requests_still_run() -> None:
    """A reading that crossed with the group's end brought it back, and nothing ever took it away again."""
    turns = Turns()
    seen(turns, running("t1", 900))
    turns.forget("g")
    for _ in range(2):
        assert seen(turns, running("t1", 950)) == [950]
        assert not turns._groups
    seen(turns)
    assert not turns._gone


def test_jit_keeps_a_group_waiting_for_its_member_in_a_tool_call() -> None:
    """A member that is out of sight has settled for `jit`: its group would count as there while a tool still works."""
    turns, feed, groups = Turns(), PolicyFeed(configured()), Groups(2)
    groups.added(types.GroupsAdded(at=0.0, step=1, groups=(types.NewGroup(group="g", size=2),)))

    def happens(event: events.RequestProgress | group_events.TrajectoryFinished) -> InFlight:
        for seen_event in feed.read(event, 1.0):
            assert isinstance(seen_event, types.RequestProgress)
            groups.progress(seen_event)
        return groups.in_flight()

    def reads(*requests: engine_pb2.RequestProgress) -> InFlight:
        report = engine_pb2.ProgressReport(requests=requests, covered_share=1.0)
        return happens(requests_of(report, "train", turns, Reports()))

    reads(running("t1", 900), running("u1", 40, trajectory=1))
    reads(running("t2", 20), running("u1", 50, trajectory=1))
    flight = reads(running("u1", 60, trajectory=1))
    assert flight.snapshot.settled.tolist() == [0]
    assert sorted(flight.snapshot.tokens.tolist()) == [60, 920]
    turns.settle("g", 0)
    happens(group_events.TrajectoryFinished("g", 0, 930, "r", False))
    flight = reads(running("u1", 70, trajectory=1))
    assert flight.snapshot.settled.tolist() == [1]
    assert flight.snapshot.tokens.tolist() == [70]
