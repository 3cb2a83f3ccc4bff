"""What an operator chooses about payload segments.

Invariants: sizes are in bytes; a level of durability means what it means for the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.runtime.journal import Durability

MIB: Final = 1 << 20

PART_BYTES: Final = MIB
"""Largest piece of a payload in one record: what one read fetches and verifies. As large as the chunks on the wire, so
that a chunk is one record and nothing is copied together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOptions:
    """How payloads are kept. Raises ValueError for sizes that cannot work, and for durability `none`."""

    durability: Durability = Durability.OS

    segment_bytes: int = 256 * MIB
    """Size at which a segment is closed and the next begun. Larger makes fewer files, and more to wait for until all
    payloads of one are gone."""

    memory_bytes: int = 128 * MIB
    """Bound of the read cache; 0 = none. Only payloads of at most one part are cached: larger ones are read in order,
    which the page cache does better."""

    in_flight_bytes: int = 64 * MIB
    """Bytes handed in but not written yet, above which producers wait."""

    ballast_bytes: int = 64 * MIB
    """Space given back when the disk is full: room to copy what lives in a mostly dead segment, so that deletes free
    space even then."""

    compact_below: float = 0.25
    """Share of live bytes under which a closed segment is copied together: each byte is then rewritten rarely, and the
    files are at most about four times what lives."""

    def __post_init__(self) -> None:
        if self.durability is Durability.NONE:
            raise ValueError("segments are for durability fsync and os; payloads in memory need none")
        for name in ("segment_bytes", "in_flight_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above zero, it is {getattr(self, name)}")
        for name in ("memory_bytes", "ballast_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, it is {getattr(self, name)}")
        if not 0 <= self.compact_below < 1:
            raise ValueError(f"compact_below must be in [0, 1), it is {self.compact_below}")
