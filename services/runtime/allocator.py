"""The C library's allocator, told what kind of process this is.

Why: messages of a megabyte come and go by the hundred. By default glibc gives such memory back to the kernel each time
and takes fresh pages for the next one, whose first touch costs more than the copying of a megabyte. On the other hand
what lives for minutes leaves holes when it goes, in an arena of each thread, and the process grows for as long as it
takes until all holes are of a size that is asked for again.

Invariant: without glibc none of this does anything.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

# Names and numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

KEPT_BYTES: Final = 32 << 20
"""Freed memory that is kept for what comes next, and the size above which memory is taken from the kernel piece by
piece (the most glibc allows): some messages of every stream that is at work, and little beside what a service holds."""

ARENAS: Final = 2
"""Python's own thread and gRPC's threads allocate, one of which mostly waits for the other. The default is eight for
each core, with holes of their own in each."""

RETURN_EVERY_S: Final = 20.0
"""Going through three hundred megabytes takes a millisecond or two; pages that are touched again within the time cost
less than that."""


def keep_freed_memory() -> None:
    """Let this process use freed memory again instead of giving it back at once."""
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_ARENA_MAX, ARENAS)


@contextmanager
def returning_holes(every_s: float = RETURN_EVERY_S) -> Iterator[None]:
    """Give back to the kernel, every so many seconds, the pages in which nothing lives; from a thread of its own."""
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is None:
        yield
        return
    over = threading.Event()

    def give_back() -> None:
        while not over.wait(every_s):
            malloc_trim(KEPT_BYTES)

    thread = threading.Thread(target=give_back, name="returning holes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _glibc(name: str) -> Any:
    """A function of glibc, None without it."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
