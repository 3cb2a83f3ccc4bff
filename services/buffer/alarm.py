"""Alarm: the earliest time at which something ends by itself, for the one task that ends it.

Invariants: nothing polls, and nothing that is due is slept through: whoever sets an earlier time than the one that is
slept towards wakes the sleeper, which asks anew.
"""

import asyncio
from collections.abc import Callable

from services.runtime.clock import Clock


class Alarm:
    """Wakes one sleeper. All times are domain time."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._armed: float | None = None

    def set(self, due: float | None) -> None:
        """Something ends at `due`, if at all."""
        if due is not None and (self._armed is None or due < self._armed):
            self._changed.set()

    async def sleep(self, clock: Clock, earliest: Callable[[], float | None]) -> None:
        """Return when the earliest time may have come; at once in the next turn if it has. It may return too early."""
        self._changed.clear()
        self._armed = earliest()
        if self._armed is None:
            await self._changed.wait()
        elif self._armed > clock.now():
            timer = clock.call_at(self._armed, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
        else:
            # More is due than ends in one turn; others get theirs in between.
            await asyncio.sleep(0)
