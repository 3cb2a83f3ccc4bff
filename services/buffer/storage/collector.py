"""The garbage collector, kept away from what is there to stay.

Why: a full collection goes through every object, which at a hundred thousand groups takes 150 ms and finds nothing:
groups hold no cycles.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
