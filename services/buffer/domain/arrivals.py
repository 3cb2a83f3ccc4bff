"""Arrivals: the present groups of a partition in order of arrival, to page through.

Invariant: sequence numbers rise along the list. Removal is lazy; groups that left are skipped, and swept out once they
are the majority.
"""

from bisect import bisect_right
from collections.abc import Collection

from services.buffer.domain.group import Group, GroupState

_LEFT = (GroupState.COMMITTED, GroupState.EVICTED)
# Groups that one page looks at: some milliseconds, for which every other call waits.
SCANNED_PER_PAGE = 20_000
# Below this a sweep costs more than it saves.
_SLACK = 64


class Arrivals:
    """Groups by arrival."""

    __slots__ = ("_groups", "_present")

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._present = 0

    def add(self, group: Group) -> None:
        """Enter the newest group."""
        self._groups.append(group)
        self._present += 1

    def present(self) -> list[Group]:
        """The groups that have not left."""
        return [group for group in self._groups if group.state not in _LEFT]

    def removed(self) -> None:
        """One of the groups has left."""
        self._present -= 1
        if len(self._groups) > 2 * self._present + _SLACK:
            self._groups = [group for group in self._groups if group.state not in _LEFT]

    def page(self, after: int, limit: int, states: Collection[GroupState]) -> tuple[list[Group], int | None]:
        """Up to `limit` groups after sequence number `after` (all states if none is given), and where to go on.

        None: there are no more. A page is short, perhaps empty, if many groups in other states had to be passed over.
        """
        found: list[Group] = []
        start = bisect_right(self._groups, after, key=lambda group: group.sequence)
        for position in range(start, min(start + SCANNED_PER_PAGE, len(self._groups))):
            group = self._groups[position]
            if group.state in _LEFT or (states and group.state not in states):
                continue
            if len(found) == limit:
                return found, found[-1].sequence
            found.append(group)
        end = start + SCANNED_PER_PAGE
        return found, self._groups[end - 1].sequence if end < len(self._groups) else None
