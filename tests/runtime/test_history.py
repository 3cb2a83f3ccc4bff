"""A history that is packed as it ages."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from services.runtime.history import BLOCK_WEIGHT, FRESH_WEIGHT, History, Packing

COUNT = 3 * FRESH_WEIGHT


def _pack(items: Sequence[int]) -> bytes:
    return json.dumps(list(items)).encode()


def history(*, first: int = 0, weight: int = 1, **how: int) -> History[int]:
    return History(Packing(_pack, json.loads, lambda _: weight), first, **how)


def filled(count: int = COUNT, **how: int) -> History[int]:
    made = history(**how)
    for number in range(made.first, made.first + count):
        made.append(number)
    return made


@pytest.mark.parametrize("first", [0, 1, 1000])
def test_every_item_comes_out_where_it_went_in(first: int) -> None:
    """An item that moves by one where a block begins is told twice or never."""
    made = filled(first=first)
    assert (made.first, made.end, len(made), made.newest) == (first, first + COUNT, COUNT, first + COUNT - 1)
    for position in range(first, first + COUNT, 37):
        assert made.read(position, 100) == list(range(position, min(position + 100, made.end)))
    assert made.read(made.end, 10) == []
    assert list(made.snapshot()) == list(range(first, first + COUNT))


def test_few_items_are_kept_as_they_are() -> None:
    """As objects, a hundred thousand events of each run fill the memory of a small machine."""
    made = filled(100_000)
    assert made.unpacked <= FRESH_WEIGHT + BLOCK_WEIGHT


def test_heavy_items_are_packed_sooner_and_the_newest_never() -> None:
    """A reading of a thousand requests counts for a thousand events; who asks for the last one must not unpack it."""
    made = filled(20, weight=BLOCK_WEIGHT)
    assert made.unpacked <= FRESH_WEIGHT // BLOCK_WEIGHT + 1
    huge = filled(20, weight=100 * FRESH_WEIGHT)
    assert huge.unpacked == 1
    assert list(huge.snapshot()) == list(range(20))


def test_what_is_trimmed_is_gone_and_the_rest_stays() -> None:
    """Trimming drops whole blocks: what is left of one must not shift, nor come back."""
    made = filled()
    for first in (1, BLOCK_WEIGHT, BLOCK_WEIGHT + 5, 2 * FRESH_WEIGHT, COUNT - 3, COUNT):
        packed = made.packed_bytes
        made.trim(first)
        assert (made.first, len(made)) == (first, COUNT - first)
        assert list(made.snapshot()) == made.read(first, COUNT) == list(range(first, COUNT))
        assert made.packed_bytes <= packed
    made.trim(5)
    assert made.first == COUNT
    made.append(COUNT)
    assert list(made.snapshot()) == [COUNT]
    assert (made.unpacked, made.packed_bytes) == (1, 0)


def test_packed_items_have_a_limit_in_bytes() -> None:
    """A limit in items alone lets large ones fill the memory before they are many."""
    made = filled(100_000, max_bytes=10_000)
    assert 5_000 < made.packed_bytes <= 10_000
    assert made.first > 0
    assert made.read(made.first, 10) == list(range(made.first, made.first + 10))
    assert list(made.snapshot()) == list(range(made.first, made.end))


def test_a_snapshot_is_that_of_its_moment() -> None:
    """It is written down little by little while the history goes on and is trimmed."""
    made = filled()
    taken = made.snapshot()
    assert next(taken) == 0
    for number in range(COUNT, 2 * COUNT):
        made.append(number)
    made.trim(2 * COUNT)
    assert list(taken) == list(range(1, COUNT))


def test_a_history_that_is_trimmed_all_along_stays_small() -> None:
    """What is trimmed item by item must free its block in the end."""
    made = history()
    for number in range(50_000):
        made.append(number)
        made.trim(made.end - 100)
        assert len(made) <= 100
    assert made.unpacked <= FRESH_WEIGHT + BLOCK_WEIGHT
    assert made.packed_bytes < 10 * BLOCK_WEIGHT
