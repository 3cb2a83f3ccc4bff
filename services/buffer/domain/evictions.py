"""EvictionLog: what left unused, countable between any two cursors.

Invariants: each evicted group is counted once, under all its reasons; a cursor is a position between evictions, and the
difference of two cursors that were handed out is exact, mean and extremes included. Evictions between two handed-out
cursors are kept as one summary, so the log grows with the waits and not with the groups.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from services.runtime.errors import invalid_argument

# Waits remembered: far more than a trainer lets pass between two answers it uses. Older cursors get what is still kept.
_MAX_SUMMARIES = 10_000


class EvictionReason(Enum):
    """Why a group left unused; the numbers are those of the wire."""

    STALE = 1
    ZERO_VARIANCE = 2
    FAILED = 3
    REQUESTED = 4


@dataclass(slots=True)
class EvictionSummary:
    """Evictions added up; the spans are those of stale groups only."""

    evicted: int = 0
    by_reason: Counter[EvictionReason] = field(default_factory=Counter)
    span_sum: int = 0
    span_max: int = 0
    span_min: int = 0

    def count(self, reasons: Iterable[EvictionReason], span: int) -> None:
        """Add one group that left with this span."""
        self.evicted += 1
        for reason in reasons:
            self.by_reason[reason] += 1
            if reason is EvictionReason.STALE:
                self._add_spans(1, span, span, span)

    def merge(self, other: "EvictionSummary") -> None:
        """Add what another summary counted."""
        self.evicted += other.evicted
        stale = other.by_reason[EvictionReason.STALE]
        if stale:
            self._add_spans(stale, other.span_sum, other.span_max, other.span_min)
        self.by_reason.update(other.by_reason)

    def _add_spans(self, count: int, total: int, largest: int, smallest: int) -> None:
        self.span_min = min(self.span_min, smallest) if self.span_sum else smallest
        self.span_max = max(self.span_max, largest)
        self.span_sum += total

    def metrics(self) -> dict[str, float]:
        """The summary under verl's names (verl 0.9.1, `ReplayBuffer._evict_terminal_groups`), only what is not zero."""
        found: dict[str, float] = {}
        stale = self.by_reason[EvictionReason.STALE]
        if stale:
            found["training/off_policy/evicted_samples"] = stale
            found["training/off_policy/evicted_samples_staleness/mean"] = self.span_sum / stale
            found["training/off_policy/evicted_samples_staleness/max"] = self.span_max
            found["training/off_policy/evicted_samples_staleness/min"] = self.span_min
        if filtered := self.by_reason[EvictionReason.ZERO_VARIANCE]:
            found["training/filter_groups/evicted_samples"] = filtered
        if failed := self.by_reason[EvictionReason.FAILED]:
            found["training/rollout_failure/evicted_samples"] = failed
        return found

    def dominant(self) -> EvictionReason | None:
        """The reason that removed most groups."""
        return max(self.by_reason, key=self.by_reason.__getitem__, default=None)


class EvictionLog:
    """The evictions of a partition in order."""

    __slots__ = ("sealed", "spans", "total")

    def __init__(self) -> None:
        self.total = EvictionSummary()
        # (position after it, summary), oldest first.
        self.spans: list[tuple[int, EvictionSummary]] = []
        # Whether the next eviction begins a summary of its own.
        self.sealed = True

    def record(self, reasons: Iterable[EvictionReason], span: int) -> None:
        """Count one evicted group of that span."""
        reasons = tuple(reasons)
        self.total.count(reasons, span)
        if self.sealed:
            self.spans.append((0, EvictionSummary()))
            del self.spans[:-_MAX_SUMMARIES]
            self.sealed = False
        summary = self.spans[-1][1]
        summary.count(reasons, span)
        self.spans[-1] = (self.total.evicted, summary)

    def cursor(self) -> int:
        """The position now; evictions before and after it are never added up in one summary."""
        self.sealed = True
        return self.total.evicted

    def check(self, cursor: int) -> None:
        """Raise INVALID_ARGUMENT if no such position was ever handed out."""
        if cursor < 0:
            raise invalid_argument("cursor", "cursor must not be negative", value=cursor, reason="OUT_OF_RANGE")
        if cursor > self.total.evicted:
            message = f"cursor {cursor} is ahead: {self.total.evicted} groups were evicted so far"
            raise invalid_argument("cursor", message, value=cursor, reason="CURSOR_AHEAD", current=self.total.evicted)

    def since(self, cursor: int) -> EvictionSummary:
        """What was evicted after `cursor`."""
        self.check(cursor)
        found = EvictionSummary()
        for end, summary in reversed(self.spans):
            if end - summary.evicted < cursor:
                break
            found.merge(summary)
        return found
