"""Pauses: long work on the event loop, cut into slices.

Invariants: half of the time belongs to the calls: after each slice comes a pause as long as it was. Where the loop is
busy, so that pauses end late, slices grow to a quarter of what they are late by, or the work would never end; they
stay far below the 20 ms at which a loop counts as blocked.
"""

import asyncio
import time
from typing import Final

SLICE_S: Final = 0.002
"""What a call may find itself delayed by."""

LONGEST_SLICE_S: Final = 0.008
"""The same on a loop that delays calls by four times as much without it."""


class Pauses:
    """Gives the event loop away after each slice of work."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._slice = SLICE_S

    async def breathe(self) -> None:
        """Pause if the slice is over."""
        ended = time.perf_counter()
        took = ended - self._begun
        if took >= self._slice:
            await asyncio.sleep(took)
            self._begun = time.perf_counter()
            late = self._begun - ended - took
            self._slice = min(max(SLICE_S, late / 4), LONGEST_SLICE_S)
