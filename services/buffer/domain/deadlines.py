"""Deadlines: when each of many things ends, with the earliest at hand.

Invariants: a key has at most one deadline; setting, moving and finding the earliest are O(log n) amortised. Moving is
lazy: the heap may hold entries that no longer hold, `_at` is the truth.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

# The heap is rebuilt when it holds more than twice its keys and this many: below it a rebuild costs more than it saves.
_SLACK = 64


class Deadlines:
    """Deadlines by key, in domain seconds."""

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._at)

    def names(self) -> list[str]:
        """Whatever has a deadline."""
        return list(self._at)

    def get(self, key: str) -> float | None:
        """When `key` ends, if it does."""
        return self._at.get(key)

    def set(self, key: str, at: float) -> None:
        """Let `key` end at `at`, whatever it had before."""
        self._at[key] = at
        heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(due, name) for name, due in self._at.items()]
            heapify(self._heap)

    def discard(self, key: str) -> None:
        """Let `key` have no deadline."""
        self._at.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Iterator[str]:
        """Take out the keys whose deadline has come, earliest first."""
        while (due := self.next()) is not None and due <= now:
            key = heappop(self._heap)[1]
            del self._at[key]
            yield key
