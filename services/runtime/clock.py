"""Time, as something that is handed in.

Invariants: durations come from a monotonic source and are in *domain seconds*; a domain second lasts `scale` wall
seconds, so one number speeds up every policy, tolerance, lease and report at once. Transport deadlines are wall time
and are never scaled. Nothing else in the services reads the system's clock.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable
from typing import Final, Protocol


class Timer(Protocol):
    """A callback that is due at some time."""

    def cancel(self) -> None:
        """Make sure that the callback does not run any more."""
        ...


class Clock(Protocol):
    """What the services know of time."""

    @property
    def scale(self) -> float:
        """Wall seconds that one domain second lasts."""
        ...

    def now(self) -> float:
        """Monotonic time in domain seconds; only differences mean something."""
        ...

    def wall(self) -> float:
        """Unix time in seconds, for people and for the wire."""
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` on the event loop at domain time `when`, at once if that is past."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep `seconds` domain seconds; zero or less only yields."""
        ...


class ContinuedClock:
    """Another clock, its domain time moved so that it goes on from `now`, where an earlier process stopped."""

    def __init__(self, clock: Clock, now: float) -> None:
        self._clock = clock
        self._ahead = now - clock.now()

    @property
    def scale(self) -> float:
        return self._clock.scale

    def now(self) -> float:
        return self._clock.now() + self._ahead

    def wall(self) -> float:
        return self._clock.wall()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        return self._clock.call_at(when - self._ahead, callback)

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


LONGEST_TIMER_S: Final = 30 * 86400.0
"""Event loops refuse timers far in the future; what lies further away than this never comes due in one process."""


class MonotonicClock:
    """The real clock, with domain seconds of `scale` wall seconds."""

    def __init__(self, scale: float = 1.0) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"the time scale must be a positive number, not {scale}")
        self._scale = scale

    @property
    def scale(self) -> float:
        return self._scale

    def now(self) -> float:
        return time.monotonic() / self._scale

    def wall(self) -> float:
        return time.time()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        delay = (when - self.now()) * self._scale
        return asyncio.get_running_loop().call_later(min(max(delay, 0.0), LONGEST_TIMER_S), callback)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(max(seconds * self._scale, 0.0), LONGEST_TIMER_S))


class _ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A clock that stands still until a test advances it.

    Timers fire in the order of their times, and among equals in the order in which they were set; whatever wakes up
    runs until it waits again before time goes on.
    """

    SETTLE_TURNS: Final = 20
    """Turns of the event loop given to what a timer woke: enough for a chain of tasks that hand on to each other."""

    def __init__(self, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start
        self._timers: list[tuple[float, int, _ManualTimer]] = []
        self._order = itertools.count()

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def pending(self) -> int:
        """How many timers and sleepers wait."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        timer = _ManualTimer(callback)
        heapq.heappush(self._timers, (max(when, self._now), next(self._order), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        timer = self.call_at(self._now + seconds, lambda: None if woken.done() else woken.set_result(None))
        try:
            await woken
        finally:
            timer.cancel()

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        await self.advance_to(self._now + seconds)

    async def advance_to(self, when: float) -> None:
        """Let time pass until `when`, firing what is due on the way."""
        await self._settle()
        while self._timers and self._timers[0][0] <= when:
            due, _, timer = heapq.heappop(self._timers)
            if timer.callback is None:
                continue
            self._now = due
            timer.callback()
            await self._settle()
        self._now = max(self._now, when)
        await self._settle()

    async def _settle(self) -> None:
        for _ in range(self.SETTLE_TURNS):
            await asyncio.sleep(0)
