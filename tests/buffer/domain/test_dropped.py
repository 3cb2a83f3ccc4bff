"""Which prompts are dropped most, within bounded memory."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.buffer.domain.dropped import DroppedPrompt, DroppedPrompts
from services.buffer.domain.evictions import EvictionReason
from services.buffer.domain.results import FailureKind
from tests.buffer.domain.model import World, config


def drop(report: DroppedPrompts, prompt_id: str) -> None:
    report.drop(prompt_id, (EvictionReason.STALE,), prompt_id, born=0, step=1, length=1, attempt=1)


@given(
    capacity=st.integers(1, 6),
    moves=st.lists(st.tuples(st.sampled_from("abcdefghij"), st.sampled_from(["drop", "drop", "drop", "train"]))),
)
def test_the_true_count_lies_within_the_bounds_and_memory_is_bounded(
    capacity: int, moves: list[tuple[str, str]]
) -> None:
    """A report that forgets who comes back is of no use against starving."""
    report, truth = DroppedPrompts(capacity), Counter[str]()
    for name, move in moves:
        if move == "drop":
            drop(report, name)
            truth[name] += 1
        else:
            report.forget(name)
            del truth[name]
        assert len(report) <= capacity
    for entry in report.worst(capacity):
        assert entry.least <= truth[entry.prompt_id] <= entry.dropped
        assert entry.stale >= entry.least
    written = report.kept()
    again = DroppedPrompts(capacity)
    again.restore(written, report.pushed_out)
    assert again.kept() == written


def test_whoever_takes_more_than_its_share_of_the_drops_is_named() -> None:
    """A flood of prompts that are dropped once must not push the starving one out."""
    report = DroppedPrompts(10)
    for number in range(1000):
        drop(report, f"once{number}")
        if number % 8 == 0:
            drop(report, "starving")
    worst: DroppedPrompt = report.worst(1)[0]
    assert worst.prompt_id == "starving"
    assert worst.dropped >= 125
    assert len(report) == 10


def test_failed_prompts_count_and_groups_that_are_merely_flat_or_asked_away_do_not() -> None:
    """The filter throws away half of what is easy; that is no starving."""
    world = World(config(group_filter_metric="reward"))
    world.finish_new("flat", rewards=(1.0, 1.0))
    world.add("asked", "fails")
    world.run.evict_groups(world.partition, ["asked"], refill=False, at=world.at)
    [claim] = world.claim()
    world.fail(claim, FailureKind.PERMANENT)
    world.wait(1)
    assert world.partition.evictions.total.evicted == 3
    assert [(entry.prompt_id, entry.failed, entry.stale) for entry in world.partition.dropped.worst(9)] == [
        ("fails", 1, 0)
    ]
