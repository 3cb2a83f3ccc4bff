"""Order by age, and its lazy removal."""

from __future__ import annotations

import gc
import random

import pytest

from services.buffer.domain import arrivals as arrivals_module
from services.buffer.domain.ages import AgeIndex
from services.buffer.domain.arrivals import Arrivals
from services.buffer.domain.deadlines import Deadlines
from services.buffer.domain.group import Group, GroupState
from services.buffer.domain.trajectory import Trajectory


def group(sequence: int, born: int = 0) -> Group:
    return Group(f"g{sequence}", sequence, born, [Trajectory()], added_at=0.0)


def test_oldest_first_by_born_then_arrival() -> None:
    index = AgeIndex()
    for made in (group(1, 5), group(4, 3), group(2, 3), group(3, 5)):
        index.add(made)
    assert [found.sequence for found in index.oldest(10)] == [2, 4, 1, 3]
    assert [found.sequence for found in index.oldest(3)] == [2, 4, 1]
    assert [found.sequence for found in index.oldest(3, oldest_born=5)] == [1, 3]
    assert [index.count(), index.count(4), index.count(6)] == [4, 2, 0]
    first = index.first()
    assert first is not None
    assert first.sequence == 2


def test_an_empty_index_has_nothing() -> None:
    index = AgeIndex()
    assert index.first() is None
    assert index.oldest(3) == []
    index.discard(group(1))
    assert len(index) == 0


def test_random_comings_and_goings_keep_the_order() -> None:
    """A heap with lazy removal that loses or repeats an entry would sample a group twice or never."""
    rng = random.Random(7)
    index = AgeIndex()
    present: dict[int, Group] = {}
    made = {number: group(number, rng.randrange(3)) for number in range(60)}
    for _ in range(5000):
        number = rng.randrange(60)
        if number in present:
            index.discard(present.pop(number))
        else:
            index.add(made[number])
            present[number] = made[number]
        assert (made[number] in index) == (number in present)
        expected = sorted(present.values(), key=lambda entry: (entry.born, entry.sequence))
        assert index.oldest(5) == expected[:5]
        assert index.first() is (expected[0] if expected else None)
        assert len(index) == len(present)
        assert sorted(entry.sequence for entry in index.older_than(1)) == sorted(
            entry.sequence for entry in expected if entry.born < 1
        )


def test_deadlines_move_and_come_due_in_order() -> None:
    deadlines = Deadlines()
    for name, at in (("a", 5.0), ("b", 3.0), ("c", 9.0)):
        deadlines.set(name, at)
    deadlines.set("b", 7.0)
    deadlines.discard("c")
    deadlines.discard("never")
    assert (deadlines.next(), deadlines.get("b"), deadlines.get("c"), len(deadlines)) == (5.0, 7.0, None, 2)
    assert list(deadlines.pop_due(4.0)) == []
    assert list(deadlines.pop_due(7.0)) == ["a", "b"]
    assert deadlines.next() is None


def test_renewing_for_ever_takes_no_memory() -> None:
    """A claim renewed every second for a week must not leave an entry each time."""
    deadlines = Deadlines()
    for second in range(10_000):
        deadlines.set("claim", float(second))
    assert len(deadlines._heap) < 200
    assert deadlines.next() == 9_999.0


def test_pages_skip_what_left() -> None:
    arrivals = Arrivals()
    groups = [group(number) for number in range(1, 301)]
    for made in groups:
        arrivals.add(made)
    for made in groups[:250]:
        made.state = GroupState.EVICTED
        arrivals.remove(made)
    page, following = arrivals.page(0, 20, ())
    assert [made.sequence for made in page] == list(range(251, 271))
    assert following == 270
    page, following = arrivals.page(page[-1].sequence, 100, ())
    assert [made.sequence for made in page] == list(range(271, 301))
    assert following is None
    groups[299].state = GroupState.FINISHED
    assert arrivals.page(0, 5, {GroupState.FINISHED}) == ([groups[299]], None)


def test_a_group_that_left_is_let_go_at_once() -> None:
    """Kept until they were the majority, trained groups took as much memory as those that were there."""
    arrivals = Arrivals()
    made = [group(number) for number in range(1, 2001)]
    for each in made:
        arrivals.add(each)
    for number in [*range(500, 1000), *range(500)]:
        arrivals.remove(made[number])
    held = {id(each) for held in gc.get_referents(arrivals) for each in gc.get_referents(held)}
    assert not held & set(map(id, made[:1000]))
    assert held >= set(map(id, made[1000:]))
    page, following = arrivals.page(0, 2000, ())
    assert ([each.sequence for each in page], following) == (list(range(1001, 2001)), None)


def test_a_page_passes_over_so_many_groups_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for one failed group among a million would stop every run of the service."""
    monkeypatch.setattr(arrivals_module, "SCANNED_PER_PAGE", 10)
    arrivals = Arrivals()
    groups = [group(number) for number in range(1, 36)]
    for made in groups:
        arrivals.add(made)
    groups[34].state = GroupState.FAILED
    found, after = [], 0
    steps = []
    while True:
        page, following = arrivals.page(after, 5, {GroupState.FAILED})
        found += page
        if following is None:
            break
        steps.append(following)
        after = following
    assert (found, steps) == ([groups[34]], [10, 20, 30])
