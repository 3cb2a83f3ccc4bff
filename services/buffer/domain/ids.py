"""Ids that the buffer makes: claims, leases, refill claims, payloads.

Invariant: an id is unique over the life of the run and, by a prefix that nobody used before, over restarts.
"""


class Ids:
    """Counts up under a prefix."""

    __slots__ = ("_next", "_prefix")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._next = 1

    def make(self, kind: str) -> str:
        """A new id, for example `claim-3f9c-12`."""
        made = f"{kind}-{self._prefix}-{self._next:x}"
        self._next += 1
        return made
