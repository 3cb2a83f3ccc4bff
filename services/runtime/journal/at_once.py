"""AtOnce: whether a small commit in durability `os` happens on the event loop.

Invariants: such a commit is a copy into memory of the kernel, which takes a tenth of the way to another thread and
back; once one had to wait, for a disk that is behind, commits keep off the loop for so long that it loses little.
"""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable
from time import perf_counter
from typing import Final

AT_ONCE_BYTES: Final = 16 << 10
"""Largest commit on the loop: some 50 us of copying and checksumming."""

SLOW_S: Final = 0.01
"""A commit on the loop that waits, and for longer, shows that the kernel holds writers up for a disk that is behind."""

AWAY: Final = 10.0
"""Times as long as such a commit took, commits then keep off the loop: together they hold it up little."""

_THREAD: Final[int | None] = getattr(resource, "RUSAGE_THREAD", None)
_UNKNOWN: Final = itertools.count()


def _waits() -> int:
    """How often this thread gave up the processor to wait for something. That it was taken away does not count."""
    # Where the system does not say, every long one counts.
    return next(_UNKNOWN) if _THREAD is None else resource.getrusage(_THREAD).ru_nvcsw


class AtOnce:
    """What the last commits on the loop have shown."""

    def __init__(self) -> None:
        self._again = 0.0

    def may(self, size: int) -> bool:
        """Return whether a commit of `size` bytes may happen on the loop now."""
        return size <= AT_ONCE_BYTES and perf_counter() >= self._again

    def run(self, commit: Callable[[], bool]) -> bool:
        """Commit now; returns what `commit` does, which is whether it had its chance to. Raises what it raises."""
        waits, begun = _waits(), perf_counter()
        stored = commit()
        if stored:
            now = perf_counter()
            if now - begun > SLOW_S and _waits() != waits:
                self._again = now + AWAY * (now - begun)
        return stored
