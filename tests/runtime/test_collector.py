"""The garbage collector looks at few objects, and what is frozen is still freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from services.runtime.collector import RESIDENTS, no_collections, short_collections


class Resident:
    """Something that stays."""


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Leave nothing frozen behind."""
    yield
    gc.unfreeze()


def test_what_stays_is_kept_out_of_full_collections() -> None:
    """A full collection over a hundred thousand groups holds up every call for 50 ms and more."""
    gc.collect()
    gc.freeze()
    with short_collections():
        residents = [Resident() for _ in range(3 * RESIDENTS)]
        gc.collect(1)
        gc.collect(1)
        assert len(gc.get_objects(generation=2)) <= RESIDENTS
        assert gc.get_freeze_count() >= len(residents)
        last = weakref.ref(residents[-1])
        residents.clear()
        assert last() is None
    assert not [
        callback for callback in gc.callbacks if getattr(callback, "__module__", "") == no_collections.__module__
    ]


def test_cycles_of_the_young_are_found() -> None:
    """Frozen too early, the cycles of every call would stay for ever."""
    gc.collect()
    with short_collections():
        gone = []
        for _ in range(100):
            cycle = Resident()
            cycle.itself = cycle  # type: ignore[attr-defined]
            gone.append(weakref.ref(cycle))
            del cycle
        gc.collect(1)
        assert not [found for found in gone if found() is not None]


def test_what_is_made_meanwhile_is_never_looked_at() -> None:
    with no_collections():
        assert not gc.isenabled()
        made = [Resident() for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(made)
