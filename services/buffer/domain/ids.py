"""Ids that the buffer makes: claims, leases, refill claims, payloads.

Invariant: an id is unique over the life of the run and, by a prefix that nobody used before, over restarts, also when a
restart of the machine lost ids that were made. Which id comes next follows from how many were made.
"""


class Ids:
    """Counts up under a prefix."""

    __slots__ = ("next_number", "prefix")

    def __init__(self, prefix: str, next_number: int = 1) -> None:
        self.prefix = prefix
        self.next_number = next_number

    def make(self, kind: str) -> str:
        """A new id, for example `claim-3f9c-12`."""
        made = f"{kind}-{self.prefix}-{self.next_number:x}"
        self.next_number += 1
        return made
