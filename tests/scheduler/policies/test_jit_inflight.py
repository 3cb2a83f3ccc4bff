"""Readings of running requests, as they come and as they fail to come."""

from services.scheduler.policies.jit.inflight import Groups
from services.scheduler.policies.types import GroupsAdded, NewGroup, Pool, RequestKey, RequestProgress, RequestState


def state(
    group: str, member: int, tokens: int, *, finished: bool = False, pool: Pool = Pool.STANDALONE
) -> RequestState:
    return RequestState(key=RequestKey(group, member), tokens=tokens, replica="r", pool=pool, finished=finished)


def read(groups: Groups, *states: RequestState, at: float = 1.0) -> None:
    groups.progress(RequestProgress(at=at, requests=states, covered_share=1.0))


def two_groups() -> Groups:
    groups = Groups(2)
    groups.added(GroupsAdded(at=0, step=1, groups=(NewGroup(group="a", size=2), NewGroup(group="b", size=2))))
    return groups


def test_groups_that_nobody_runs_are_fresh() -> None:
    """They will take as long as any new one."""
    groups = two_groups()
    read(groups, state("a", 0, 5))
    flight = groups.in_flight()
    assert (flight.names, flight.fresh) == (("a",), ("b",))
    assert flight.snapshot.tokens.tolist() == [5, 0]
    assert flight.running.tolist() == [True, False]


def test_a_member_that_disappears_has_settled_at_its_last_length() -> None:
    """Controllers need not report what finished; counted as not begun, it would keep its group waiting for ever."""
    groups = two_groups()
    read(groups, state("a", 0, 5), state("a", 1, 7))
    read(groups, state("a", 1, 9), at=2.0)
    flight = groups.in_flight()
    assert flight.snapshot.tokens.tolist() == [9]
    assert flight.snapshot.settled.tolist() == [1]


def test_a_member_that_comes_back_runs_on() -> None:
    """Requests are out of sight while they move from one replica to another."""
    groups = two_groups()
    read(groups, state("a", 0, 5), state("a", 1, 7))
    read(groups, state("a", 1, 9))
    read(groups, state("a", 0, 6), state("a", 1, 9))
    flight = groups.in_flight()
    assert sorted(flight.snapshot.tokens.tolist()) == [6, 9]
    assert flight.snapshot.settled.tolist() == [0]


def test_a_message_about_finished_members_alone_is_no_reading() -> None:
    """It says nothing about those that run."""
    groups = two_groups()
    read(groups, state("a", 0, 5), state("a", 1, 7))
    read(groups, state("a", 0, 8, finished=True), at=2.0)
    assert groups.read_at == 1.0
    assert groups.in_flight().snapshot.tokens.tolist() == [7]


def test_groups_added_before_the_policy_began_to_look() -> None:
    """A policy that is switched on in the middle of a run finds groups it never saw added."""
    groups = Groups(2)
    read(groups, state("x", 1, 5, pool=Pool.HYBRID))
    flight = groups.in_flight()
    assert flight.names == ("x",)
    assert flight.snapshot.tokens.tolist() == [5, 0]
    assert groups.hybrid_tokens == 5


def test_finished_and_failed_groups_leave() -> None:
    """What is gone is not waited for."""
    groups = two_groups()
    read(groups, state("a", 0, 5), state("b", 0, 5))
    groups.left("a")
    groups.left("never heard of")
    assert groups.in_flight().names == ("b",)


def test_a_group_whose_members_all_settled_is_about_to_finish() -> None:
    """Its end is on its way; it must not divide by zero members."""
    groups = two_groups()
    read(groups, state("a", 0, 5, finished=True), state("a", 1, 6, finished=True), state("b", 0, 1))
    flight = groups.in_flight()
    assert len(flight.snapshot.first) == len(flight.names) == 2


def test_a_group_that_left_does_not_come_back_with_a_late_reading() -> None:
    """A reading that crossed with its end, or an engine that went on with a group that was dropped, brought it back:
    as one that is about to finish, for the rest of the run."""
    groups = two_groups()
    read(groups, state("a", 0, 5), state("b", 0, 5))
    groups.left("a")
    read(groups, state("a", 0, 9), state("b", 0, 9), at=2.0)
    read(groups, state("a", 0, 12), state("b", 0, 12), at=3.0)
    read(groups, state("b", 0, 15), at=4.0)
    assert (len(groups), groups.in_flight().names) == (1, ("b",))
    groups.left("b")
    read(groups, state("b", 0, 16), at=5.0)
    assert (len(groups), groups.read_at) == (0, 5.0)
    groups.added(GroupsAdded(at=6, step=2, groups=(NewGroup(group="b", size=2),)))
    read(groups, state("b", 0, 1), at=7.0)
    assert groups.in_flight().names == ("b",)
