"""Arrivals: the present groups of a partition in order of arrival, to page through.

Invariants: sequence numbers rise along the list; a group that left is let go at once, and only its place is swept out
later, once such places are the majority.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection

from services.buffer.domain.group import Group, GroupState

# Groups that one page looks at: some milliseconds, for which every other call waits.
SCANNED_PER_PAGE = 20_000
# Below this a sweep costs more than it saves.
_SLACK = 64


class Arrivals:
    """Groups by arrival."""

    __slots__ = ("_groups", "_present", "_sequences")

    def __init__(self) -> None:
        # By place; None: it left.
        self._groups: list[Group | None] = []
        self._sequences: list[int] = []
        self._present = 0

    def add(self, group: Group) -> None:
        """Enter the newest group."""
        self._groups.append(group)
        self._sequences.append(group.sequence)
        self._present += 1

    def remove(self, group: Group) -> None:
        """A group that was entered has left."""
        self._groups[bisect_left(self._sequences, group.sequence)] = None
        self._present -= 1
        if len(self._groups) > 2 * self._present + _SLACK:
            left = [each for each in self._groups if each is not None]
            self._groups, self._sequences = [*left], [each.sequence for each in left]

    def page(self, after: int, limit: int, states: Collection[GroupState]) -> tuple[list[Group], int | None]:
        """Up to `limit` groups after sequence number `after` (all states if none is given), and where to go on.

        None: there are no more. A page is short, perhaps empty, if many groups in other states had to be passed over.
        """
        found: list[Group] = []
        start = bisect_right(self._sequences, after)
        for position in range(start, min(start + SCANNED_PER_PAGE, len(self._groups))):
            group = self._groups[position]
            if group is None or (states and group.state not in states):
                continue
            if len(found) == limit:
                return found, found[-1].sequence
            found.append(group)
        end = start + SCANNED_PER_PAGE
        return found, self._sequences[end - 1] if end < len(self._groups) else None
