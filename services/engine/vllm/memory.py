"""What the workers of an engine tell about their memory, which our extension measures.

Invariant: nothing is computed from a configuration: `used` is what the device or the system counts, and a tag has the
bytes that are really behind it, or is not told at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

MEMORY_METHOD: Final = "turnout_memory"
"""The method of the extension, called by collective RPC on all workers."""


def read_memory(workers: Sequence[Mapping[str, Any]]) -> tuple[int, Mapping[str, int] | None]:
    """Bytes that all workers hold, and those behind each tag; None if one of them cannot measure that."""
    used = sum(worker["used"] for worker in workers)
    tagged = [worker["tags"] for worker in workers]
    if any(tags is None for tags in tagged):
        return used, None
    return used, {tag: sum(tags[tag] for tags in tagged) for tag in tagged[0]}
