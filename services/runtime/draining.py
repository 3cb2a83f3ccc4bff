"""The state in which a service stops: it takes nothing new, and what is parked ends.

Invariants: draining is entered once and never left; whoever waits through `race` or `check` ends with UNAVAILABLE and
the reason DRAINING, which tells a client that repeating the call elsewhere or later is safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from services.runtime.errors import TurnoutError, unavailable

T = TypeVar("T")


def draining_error() -> TurnoutError:
    """What a call that cannot be answered any more ends with."""
    return unavailable("DRAINING", "the service is stopping; the call may be repeated")


class Draining:
    """One per service; parked calls race against it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def is_set(self) -> bool:
        """Whether the service is stopping."""
        return self._event.is_set()

    def set(self) -> None:
        """Begin to drain."""
        self._event.set()

    def check(self) -> None:
        """Raise UNAVAILABLE / DRAINING if the service is stopping."""
        if self.is_set:
            raise draining_error()

    async def wait(self) -> None:
        """Return once the service is stopping."""
        await self._event.wait()

    async def race(self, awaitable: Awaitable[T]) -> T:
        """Return what `awaitable` gives, or cancel it and raise UNAVAILABLE / DRAINING if the service stops first."""
        work = asyncio.ensure_future(awaitable)
        stop = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise draining_error()
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
