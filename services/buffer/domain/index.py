"""GroupIndex: the groups of a partition by state and age, so that no question walks them.

Invariants: a present group is entered exactly once, under the state and born step it has; both change only between
`leave` and `enter`. `sampleable(step)` is exactly the number of groups `oldest(step, ...)` can return.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from services.buffer.domain.ages import AgeIndex
from services.buffer.domain.config import Staleness
from services.buffer.domain.depth import Counts, Hold
from services.buffer.domain.group import Group, GroupState
from services.buffer.domain.staleness import oldest_kept, span, youngest_holder


class GroupIndex:
    """Groups by state; `training` tells whether staleness and filters apply."""

    __slots__ = (
        "_failed",
        "_filtered",
        "_ready",
        "_reissued",
        "_running",
        "_started",
        "_training",
        "_unstarted",
        "counts",
    )

    def __init__(self, *, training: bool) -> None:
        self._training = training
        self.counts = Counts()
        self._unstarted = AgeIndex()
        self._reissued = AgeIndex()
        self._running = AgeIndex()
        self._ready = AgeIndex()
        self._filtered: dict[int, Group] = {}
        self._failed: dict[int, Group] = {}
        # By time of first claim. An OrderedDict, since the first entry of a dict is found in O(removed before it).
        self._started: OrderedDict[int, Group] = OrderedDict()

    def enter(self, group: Group) -> None:
        """Put a group where its state says."""
        counts = self.counts
        match group.state:
            case GroupState.PENDING:
                counts.pending += 1
                self._unstarted.add(group)
            case GroupState.RUNNING:
                counts.running += 1
                self._running.add(group)
                self._started[group.sequence] = group
                if group.pending:
                    self._reissued.add(group)
            case GroupState.FINISHED:
                counts.finished += 1
                if self._training and group.zero_variance:
                    self._filtered[group.sequence] = group
                else:
                    self._ready.add(group)
            case GroupState.FAILED:
                counts.failed += 1
                if self._training:
                    self._failed[group.sequence] = group
                else:
                    self._ready.add(group)
            case GroupState.SAMPLED:
                counts.sampled += 1

    def leave(self, group: Group) -> None:
        """Take a group out from where its state says."""
        counts = self.counts
        match group.state:
            case GroupState.PENDING:
                counts.pending -= 1
                self._unstarted.discard(group)
            case GroupState.RUNNING:
                counts.running -= 1
                self._running.discard(group)
                del self._started[group.sequence]
                self._reissued.discard(group)
            case GroupState.FINISHED:
                counts.finished -= 1
                self._filtered.pop(group.sequence, None)
                self._ready.discard(group)
            case GroupState.FAILED:
                counts.failed -= 1
                self._failed.pop(group.sequence, None)
                self._ready.discard(group)
            case GroupState.SAMPLED:
                counts.sampled -= 1

    def work_changed(self, group: Group) -> None:
        """A running group stays running but has gained or lost pending trajectories."""
        if not group.pending:
            self._reissued.discard(group)
        elif group not in self._reissued:
            self._reissued.add(group)

    def snapshot(self) -> Counts:
        """The counts as they are now."""
        counts = self.counts
        return Counts(counts.pending, counts.running, counts.finished, counts.failed, counts.sampled)

    def next_work(self, *, unstarted: bool) -> Group | None:
        """The oldest group with pending trajectories; `unstarted` says whether groups nobody started are allowed."""
        begun = self._reissued.first()
        fresh = self._unstarted.first() if unstarted else None
        if begun is None or fresh is None:
            return begun or fresh
        return min(begun, fresh, key=lambda group: (group.born, group.sequence))

    def sampleable(self, step: int, staleness: Staleness) -> int:
        """How many groups can be sampled at `step`, a hold disregarded."""
        return self._ready.count(self._oldest_kept(step, staleness))

    def oldest(self, step: int, staleness: Staleness, count: int) -> list[Group]:
        """The `count` oldest sampleable groups, or all if there are fewer."""
        return self._ready.oldest(count, self._oldest_kept(step, staleness))

    def hold(self, step: int, staleness: Staleness) -> Hold | None:
        """The oldest started group that holds sampling at `step`."""
        holder = youngest_holder(staleness, step) if self._training else None
        if holder is None:
            return None
        oldest = self._running.first()
        if oldest is None or oldest.born > holder:
            return None
        return Hold(oldest.group_id, span(step, oldest.born))

    def due(self, step: int, staleness: Staleness, limit: int | None = None) -> list[Group]:
        """The groups to evict at `step`, or `limit` of them."""
        return list(islice(self._due(step, staleness), limit))

    def _due(self, step: int, staleness: Staleness) -> Iterator[Group]:
        yield from self._failed.values()
        yield from self._filtered.values()
        kept = self._oldest_kept(step, staleness)
        if kept is not None:
            yield from self._ready.older_than(kept)

    def _oldest_kept(self, step: int, staleness: Staleness) -> int | None:
        return oldest_kept(staleness, step) if self._training else None

    def sort_running(self) -> None:
        """Put the running groups, entered in any order, into that of their first claims."""
        running = sorted(self._started.values(), key=lambda group: (group.started_at, group.sequence))
        self._started = OrderedDict((group.sequence, group) for group in running)

    def longest_running(self) -> Group | None:
        """The running group that was claimed longest ago."""
        return next(iter(self._started.values()), None)
