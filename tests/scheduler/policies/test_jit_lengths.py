"""What `jit` believes of lengths, against lengths it did not see."""

import numpy as np
import pytest

from services.scheduler.policies.jit.inflight import Groups
from services.scheduler.policies.jit.lengths import LengthModel
from services.scheduler.policies.types import GroupsAdded, NewGroup, Pool, RequestKey, RequestProgress, RequestState

SIZE = 8


def drawn(generator: np.random.Generator, groups: int, mean_log: float = 9.2) -> np.ndarray:
    """Lengths by group and member: 85 % of the log-variance between groups."""
    level = mean_log + generator.normal(size=(groups, 1)) * 0.69
    return np.minimum(np.exp(level + generator.normal(size=(groups, SIZE)) * 0.29), 32_768).astype(int)


def taught(lengths: np.ndarray, cap: int | None = 32_768) -> LengthModel:
    model = LengthModel(cap, 64)
    for group in lengths:
        model.finished(tuple(int(length) for length in group))
    return model


def reading(lengths: np.ndarray, at_tokens: int) -> Groups:
    """Groups of which every member has `at_tokens` tokens, or is finished."""
    groups = Groups(SIZE)
    names = [f"g{number}" for number in range(len(lengths))]
    groups.added(GroupsAdded(at=0, step=1, groups=tuple(NewGroup(group=name, size=SIZE) for name in names)))
    states = [
        RequestState(
            key=RequestKey(name, member),
            tokens=min(int(length), at_tokens),
            replica="r",
            pool=Pool.STANDALONE,
            finished=bool(length <= at_tokens),
        )
        for name, group in zip(names, lengths, strict=True)
        for member, length in enumerate(group)
    ]
    groups.progress(RequestProgress(at=1, requests=tuple(states), covered_share=1.0))
    return groups


def test_what_is_left_of_running_groups_is_predicted_without_bias() -> None:
    """Deciding by predictions that are too short (or long) on average lends too briefly (or for too long).

    The truth of 400 groups that run on at 6 000 tokens has to fall evenly over the predicted range.
    """
    generator = np.random.default_rng(5)
    model = taught(drawn(generator, 384))
    lengths = drawn(generator, 900)
    lengths = lengths[lengths.max(axis=1) > 6000][:400]
    flight = reading(lengths, 6000).in_flight()
    left, _ = model.draw(flight.snapshot, 0, SIZE, 24)
    predicted = np.maximum.reduceat(left, flight.snapshot.first, axis=0)
    truth = lengths.max(axis=1) - 6000
    rank = (predicted < truth[:, None]).mean(axis=1)
    assert rank.mean() == pytest.approx(0.5, abs=0.06)
    assert np.mean(rank < 0.25) == pytest.approx(0.25, abs=0.08)
    assert np.mean(rank > 0.75) == pytest.approx(0.25, abs=0.08)


def test_new_groups_are_predicted_like_those_that_finished() -> None:
    """The next batch is most of what a step's end decides on."""
    generator = np.random.default_rng(6)
    lengths = drawn(generator, 192)
    empty = Groups(SIZE).in_flight().snapshot
    _, new = taught(lengths).draw(empty, 64, SIZE, 24)
    assert new.shape == (64 * SIZE, 24)
    assert np.median(new) == pytest.approx(np.median(lengths), rel=0.08)
    assert new.mean() == pytest.approx(lengths.mean(), rel=0.08)


@pytest.mark.parametrize("seed", range(3))
def test_a_young_run_is_not_taken_for_one_of_short_answers(seed: int) -> None:
    """When the first half has finished, it is the short half: believing it, the demo's second step was not lent for and
    waited 151 s instead of the predicted 48 s."""
    lengths = drawn(np.random.default_rng(seed), 128)
    slowest = lengths.max(axis=1)
    half = int(np.median(slowest))
    model = taught(lengths[slowest <= half])
    running = lengths[slowest > half]
    _, new = model.draw(reading(running, half).in_flight().snapshot, 64, SIZE, 24)
    assert new.mean() == pytest.approx(lengths.mean(), rel=0.2)
    _, naive = model.draw(Groups(SIZE).in_flight().snapshot, 64, SIZE, 24)
    assert naive.mean() < 0.8 * lengths.mean()


def test_siblings_that_finished_tell_about_the_rest() -> None:
    """Most of the variance lies between prompts: a group whose first members were short is a short one."""
    generator = np.random.default_rng(7)
    model = taught(drawn(generator, 384))
    short, long = np.full((1, SIZE), 900), np.full((1, SIZE), 900)
    short[0, -1] = long[0, :] = 30_000
    medians = []
    for lengths in (short, long):
        flight = reading(lengths, 1000).in_flight()
        left, _ = model.draw(flight.snapshot, 0, SIZE, 24)
        medians.append(float(np.median(left[-1])))
    assert medians[0] < 0.5 * medians[1]


def test_no_response_is_predicted_beyond_the_cap() -> None:
    """At the cap a response ends, however long its group is."""
    model = taught(np.full((60, SIZE), 900), cap=1000)
    flight = reading(np.full((4, SIZE), 1000), 990).in_flight()
    left, new = model.draw(flight.snapshot, 5, SIZE, 24)
    assert left.max() <= 10
    assert new.max() <= 1000


def test_a_response_longer_than_all_before_is_still_possible() -> None:
    """Lengths that double must not divide by zero, and have to be noticed before any of them finishes."""
    model = taught(np.random.default_rng(8).integers(800, 1200, (64, SIZE)))
    flight = reading(np.full((8, SIZE), 20_000), 5000).in_flight()
    left, _ = model.draw(flight.snapshot, 0, SIZE, 24)
    assert np.isfinite(left).all()
    assert left.min() >= 1


def test_groups_of_one_member() -> None:
    """Without siblings there is no scatter within a group to learn."""
    model = LengthModel(None, 64)
    for length in np.random.default_rng(9).integers(100, 5000, 64):
        model.finished((int(length),))
    empty = Groups(1).in_flight().snapshot
    _, new = model.draw(empty, 64, 1, 24)
    assert 1000 < np.median(new) < 4500


def test_the_same_knowledge_gives_the_same_draws_and_members_keep_theirs() -> None:
    """Two predictions shortly after each other may differ by what was learned, not by luck."""
    generator = np.random.default_rng(10)
    model = taught(drawn(generator, 384))
    lengths = np.full((5, SIZE), 30_000)
    flight = reading(lengths, 5000)
    first, _ = model.draw(flight.in_flight().snapshot, 0, SIZE, 24)
    again, _ = model.draw(flight.in_flight().snapshot, 0, SIZE, 24)
    flight.left("g0")
    fewer, _ = model.draw(flight.in_flight().snapshot, 0, SIZE, 24)
    assert np.array_equal(first, again)
    assert np.array_equal(first[SIZE:], fewer)


@pytest.mark.parametrize(("batch", "finished", "ready"), [(64, 47, False), (64, 48, True), (8, 7, False), (8, 8, True)])
def test_a_few_groups_are_not_enough(batch: int, finished: int, ready: bool) -> None:
    """The first that finish are the short ones."""
    model = LengthModel(1000, batch)
    for _ in range(finished):
        model.finished((10, 20))
    assert model.ready is ready
