"""The memory of an engine as it was measured last.

Invariant: numbers come from a reading of the engine, never from what it was told to take or to free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.engine.guarded.surface import Reading
from services.runtime.errors import aborted

FREED_SHARE: Final = 0.01
"""A sleep that gave back less than this share of what its tags held did nothing: an engine without sleep mode says
yes all the same. Small, since other processes of the device come and go meanwhile."""


@dataclass(slots=True)
class Memory:
    """Bytes in use and bytes behind each tag; None where the engine does not tell."""

    used: int | None = None
    tagged: Mapping[str, int] | None = None

    def take(self, reading: Reading) -> None:
        """Remember what a reading tells of memory, if it was looked at."""
        if reading.memory_bytes is not None:
            self.used, self.tagged = reading.memory_bytes, reading.tagged_bytes


def check_freed(name: str, before: Reading, after: Reading) -> None:
    """ABORTED / MEMORY_NOT_FREED if a sleep between two readings freed nothing, where that can be measured."""
    if before.memory_bytes is None or after.memory_bytes is None or before.tagged_bytes is None:
        return
    held = sum(before.tagged_bytes.values())
    if before.memory_bytes - after.memory_bytes < FREED_SHARE * held:
        raise aborted(
            "MEMORY_NOT_FREED",
            f"{name} says it sleeps and holds as much memory as before",
            replica_id=name,
            before=before.memory_bytes,
            after=after.memory_bytes,
        )
