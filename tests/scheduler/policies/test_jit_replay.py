"""A step's options, looked at again with the lengths that came."""

import numpy as np
import pytest

from services.scheduler.policies.jit.forecast import forecast, options
from services.scheduler.policies.jit.inflight import Groups
from services.scheduler.policies.jit.lengths import LengthModel
from services.scheduler.policies.jit.outlook import Setting
from services.scheduler.policies.jit.replay import Replay
from services.scheduler.policies.types import (
    GroupsAdded,
    NewGroup,
    Pool,
    RequestKey,
    RequestProgress,
    RequestState,
)

SETTING = Setting(
    hybrids=4,
    standalones=2,
    base=0.01,
    slope=0.0001,
    prefill=60_000,
    lend_s=15,
    reclaim_s=5,
    mini_batch=4,
    mini_batch_s=60,
    stretch=1.0,
)


def replay(tokens: int = 3000) -> Replay:
    """Eight groups of two run with `tokens` each, eight more are to come, and two mini-batches of four are trained."""
    groups = Groups(2)
    names = [f"g{number}" for number in range(8)]
    groups.added(GroupsAdded(at=0, step=1, groups=tuple(NewGroup(group=name, size=2) for name in names)))
    states = tuple(
        RequestState(key=RequestKey(name, member), tokens=tokens, replica="a", pool=Pool.STANDALONE)
        for name in names
        for member in range(2)
    )
    groups.progress(RequestProgress(at=0, requests=states, covered_share=1.0))
    lengths = LengthModel(32_768, 16)
    generator = np.random.default_rng(1)
    for _ in range(48):
        lengths.finished(tuple(int(each) for each in np.exp(9 + 0.3 * generator.normal(size=2))))
    known = forecast(groups.in_flight(), 8, 2, lengths, SETTING)
    needed = known.outlook.needed(known.alive(groups), 0, 2, 0.0)
    return Replay(
        forecast=known,
        setting=SETTING,
        predicted=options(known, needed, SETTING, 18.0, 0.0),
        sampleable=0,
        mini_batches=2,
        sync_s=18.0,
        x0=0.0,
        alive=frozenset(names),
    )


def test_a_group_needed_what_its_slowest_member_still_had_to_decode() -> None:
    """Whole lengths would count what was there already."""
    seen = replay()
    seen.finished("g0", (5000, 9000))
    seen.finished("new", (700, 400))
    assert seen.completions == [6000.0, 700.0]


def test_longer_answers_than_predicted_make_both_options_longer_and_lending_better() -> None:
    """Both options have to be told again: the gain is their difference."""
    short, long = replay(), replay()
    for number in range(8):
        short.finished(f"g{number}", (3500, 3500))
        long.finished(f"g{number}", (30_000, 30_000))
    assert short.options().alone.end_s < short.predicted.alone.end_s < long.options().alone.end_s
    assert short.options().lent.end_s < long.options().lent.end_s
    assert short.options().gain_s < short.predicted.gain_s < long.options().gain_s


def test_a_group_that_had_finished_before_is_not_counted_again() -> None:
    """It is sampleable already: counted twice, the step would seem to be covered sooner."""
    seen = replay()
    seen.alive = frozenset({"g1"})
    seen.finished("g0", (5000, 9000))
    seen.finished("g1", (5000, 5000))
    assert seen.completions == [2000.0]


def test_a_step_in_which_nothing_finished_has_nothing_to_wait_for() -> None:
    """The whole batch was there when it began."""
    seen = replay()
    seen.sampleable = 8
    assert seen.options().alone.wait_s == pytest.approx(0.0)
