"""The garbage collector, kept away from what is there to stay.

Why: a full collection goes through every object, which at a hundred thousand groups takes more than 50 ms and finds
nothing: what services keep holds no cycles. What does is short-lived, and found while it is young.

Invariant: what was frozen is freed like everything else once nothing refers to it; only cycles among it are not.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

RESIDENTS: Final = 10_000
"""Objects that outlived two collections are frozen when there are so many: to go through them takes some 5 ms."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect nothing while much is made that stays, and never look at any of it later."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


@contextmanager
def short_collections() -> Iterator[None]:
    """Let no collection look at many objects: what stays is frozen as it comes. For processes that only serve."""
    gc.callbacks.append(_freeze_residents)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_residents)


def _freeze_residents(phase: Literal["start", "stop"], info: dict[str, int]) -> None:
    # At the end of a collection of the young nothing is young: only what survived it and what is old would be frozen.
    if phase == "stop" and info["generation"] == 1 and len(gc.get_objects(generation=2)) > RESIDENTS:
        gc.freeze()
