"""The state in which a service stops: it takes nothing new, and what is parked ends.

Invariants: draining is entered once and never left; whoever waits through `race` or parks ends with UNAVAILABLE and
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
        self._limits: set[asyncio.Timeout] = set()
        self._parked: set[asyncio.Future[None]] = set()

    @property
    def is_set(self) -> bool:
        """Whether the service is stopping."""
        return self._event.is_set()

    def set(self) -> None:
        """Begin to drain."""
        self._event.set()
        for limit in self._limits:
            _end_now(limit)
        for parked in self._parked:
            if not parked.done():
                parked.set_result(None)

    def check(self) -> None:
        """Raise UNAVAILABLE / DRAINING if the service is stopping."""
        if self.is_set:
            raise draining_error()

    async def wait(self) -> None:
        """Return once the service is stopping."""
        await self._event.wait()

    def park(self, future: asyncio.Future[None]) -> None:
        """Resolve `future` when the service stops, unless it is `unpark`ed before."""
        self._parked.add(future)

    def unpark(self, future: asyncio.Future[None]) -> None:
        """Leave `future` alone."""
        self._parked.discard(future)

    async def race(self, awaitable: Awaitable[T]) -> T:
        """Return what `awaitable` gives, or cancel it and raise UNAVAILABLE / DRAINING if the service stops first."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                if self.is_set:
                    _end_now(limit)
                return await awaitable
        except TimeoutError:
            if limit.expired():
                raise draining_error() from None
            raise
        finally:
            self._limits.discard(limit)


def _end_now(limit: asyncio.Timeout) -> None:
    """Let a timeout that was entered pass, unless it has."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())
