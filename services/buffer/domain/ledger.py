"""Ledger: an account of every group that was ever added.

Invariant: added = committed + evicted + present, at every moment.
"""

from collections import Counter
from dataclasses import dataclass

from services.buffer.domain.depth import Counts
from services.buffer.domain.evictions import EvictionReason


@dataclass(frozen=True, slots=True)
class Ledger:
    """A reading; `evicted_by_reason` may add up to more than `evicted`."""

    added: int
    committed: int
    evicted: int
    evicted_by_reason: Counter[EvictionReason]
    present: Counts
    credits_created: int
    credits_paid: int
    credits_cancelled: int

    @property
    def balanced(self) -> bool:
        """Whether every group is accounted for."""
        return self.added == self.committed + self.evicted + self.present.present

    def __add__(self, other: "Ledger") -> "Ledger":
        mine, theirs = self.present, other.present
        return Ledger(
            self.added + other.added,
            self.committed + other.committed,
            self.evicted + other.evicted,
            self.evicted_by_reason + other.evicted_by_reason,
            Counts(
                mine.pending + theirs.pending,
                mine.running + theirs.running,
                mine.finished + theirs.finished,
                mine.failed + theirs.failed,
                mine.sampled + theirs.sampled,
            ),
            self.credits_created + other.credits_created,
            self.credits_paid + other.credits_paid,
            self.credits_cancelled + other.credits_cancelled,
        )
