"""Pauses: long work on the event loop, cut into slices.

Invariant: half of the time belongs to the calls: after each slice comes a pause as long as it was.
"""

import asyncio
import time

# What a call may find itself delayed by; far below the 20 ms at which a loop counts as blocked.
SLICE_S = 0.002


class Pauses:
    """Gives the event loop away after each slice of work."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    async def breathe(self) -> None:
        """Pause if the slice is over."""
        took = time.perf_counter() - self._begun
        if took >= SLICE_S:
            await asyncio.sleep(took)
            self._begun = time.perf_counter()
