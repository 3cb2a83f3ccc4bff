"""AgeIndex: groups in order of (born step, arrival), counted per born step.

Invariants: a group is in it at most once; counting walks the distinct born steps, never the groups; taking the oldest
is O(log n). Removal is lazy: the heap of a born step may hold entries that left, `members` is the truth.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from services.buffer.domain.group import Group

# A heap is rebuilt when it holds more than twice its members and this many: below it a rebuild does not pay.
_SLACK = 32


class _Cohort:
    """The groups of one born step."""

    __slots__ = ("heap", "members")

    def __init__(self) -> None:
        self.members: dict[int, Group] = {}
        self.heap: list[int] = []

    def add(self, group: Group) -> None:
        self.members[group.sequence] = group
        heappush(self.heap, group.sequence)
        if len(self.heap) > 2 * len(self.members) + _SLACK:
            self.heap = list(self.members)
            heapify(self.heap)

    def first(self) -> Group:
        while self.heap[0] not in self.members:
            heappop(self.heap)
        return self.members[self.heap[0]]

    def oldest(self, count: int) -> list[Group]:
        """The `count` members that arrived first, by taking them off the heap and putting them back."""
        found: list[int] = []
        while self.heap and len(found) < count:
            sequence = heappop(self.heap)
            if sequence in self.members and (not found or found[-1] != sequence):
                found.append(sequence)
        for sequence in found:
            heappush(self.heap, sequence)
        return [self.members[sequence] for sequence in found]


class AgeIndex:
    """A set of groups ordered by age."""

    __slots__ = ("_cohorts", "_size")

    def __init__(self) -> None:
        self._cohorts: dict[int, _Cohort] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, group: Group) -> bool:
        cohort = self._cohorts.get(group.born)
        return cohort is not None and group.sequence in cohort.members

    def add(self, group: Group) -> None:
        """Put a group in; it must not be in yet, and its born step must not change while it is."""
        cohort = self._cohorts.get(group.born)
        if cohort is None:
            cohort = self._cohorts[group.born] = _Cohort()
        cohort.add(group)
        self._size += 1

    def discard(self, group: Group) -> None:
        """Take a group out, if it is in."""
        cohort = self._cohorts.get(group.born)
        if cohort is None or cohort.members.pop(group.sequence, None) is None:
            return
        self._size -= 1
        if not cohort.members:
            del self._cohorts[group.born]

    def count(self, oldest_born: int | None = None) -> int:
        """Groups born at `oldest_born` or later; all of them if None."""
        if oldest_born is None:
            return self._size
        return sum(len(cohort.members) for born, cohort in self._cohorts.items() if born >= oldest_born)

    def first(self) -> Group | None:
        """The oldest group."""
        if not self._cohorts:
            return None
        return self._cohorts[min(self._cohorts)].first()

    def oldest(self, count: int, oldest_born: int | None = None) -> list[Group]:
        """The `count` oldest groups born at `oldest_born` or later, oldest first."""
        found: list[Group] = []
        for born in sorted(born for born in self._cohorts if oldest_born is None or born >= oldest_born):
            if len(found) == count:
                break
            found += self._cohorts[born].oldest(count - len(found))
        return found

    def older_than(self, born: int) -> Iterator[Group]:
        """The groups born before `born`, in no order."""
        for cohort_born, cohort in self._cohorts.items():
            if cohort_born < born:
                yield from cohort.members.values()
