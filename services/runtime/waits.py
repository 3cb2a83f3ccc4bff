"""How long a call may stay parked, and the parking itself.

Invariants: a wait never outlives its caller's gRPC deadline, and ends `DEADLINE_MARGIN_S` before it, so that the answer
TIMED_OUT still reaches the caller; `max_wait` and gRPC deadlines are wall time whatever the time scale is; nothing
polls.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Final

from google.protobuf.duration_pb2 import Duration

from services.runtime.clock import Clock
from services.runtime.draining import Draining
from services.runtime.errors import invalid_argument

MAX_WAIT_S: Final = 30 * 86400.0
"""Longer waits are cut to this: 30 days outlive any step, and every event loop accepts it."""

DEADLINE_MARGIN_S: Final = 0.1
"""What an answer needs to get home before the caller's deadline, on a slow network and a busy machine."""


def duration_seconds(duration: Duration, field: str) -> float:
    """Return a protobuf Duration in seconds, cut to 30 days; a negative one is INVALID_ARGUMENT naming `field`."""
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds < 0:
        raise invalid_argument(field, f"{field} must not be negative, it is {seconds:g} s", value=f"{seconds:g}")
    return min(seconds, MAX_WAIT_S)


def duration_of(seconds: float) -> Duration:
    """Return seconds as a protobuf Duration, to the nanosecond."""
    # Both parts have the sign of the whole.
    nanos = abs(round(seconds * 1e9))
    sign = -1 if seconds < 0 else 1
    return Duration(seconds=sign * (nanos // 1_000_000_000), nanos=sign * (nanos % 1_000_000_000))


def wait_budget(max_wait_s: float | None, time_remaining_s: float | None, *, field: str = "max_wait") -> float:
    """Return for how many wall seconds a call may be parked; 0 means: look once and answer.

    `max_wait_s` is what the caller asked for (None: no limit of its own), `time_remaining_s` what is left of the call's
    gRPC deadline (None: it has none). Negative or NaN is INVALID_ARGUMENT naming `field`.
    """
    budget = MAX_WAIT_S
    if max_wait_s is not None:
        if math.isnan(max_wait_s) or max_wait_s < 0:
            raise invalid_argument(field, f"{field} must be zero or more seconds, not {max_wait_s}", value=max_wait_s)
        budget = min(budget, max_wait_s)
    if time_remaining_s is not None:
        budget = min(budget, time_remaining_s - DEADLINE_MARGIN_S)
    return max(budget, 0.0)


def deadline_after(clock: Clock, wall_s: float) -> float:
    """Return the domain time that lies `wall_s` wall seconds from now."""
    return clock.now() + wall_s / clock.scale


class Wake:
    """What one parked call waits for: set by anybody on the event loop, cleared and waited for by that call alone.

    An asyncio.Event serves many, and to end its wait at a deadline takes a timeout, which cancels and catches; a
    thousand calls may be parked and woken at once, so this is one future.
    """

    __slots__ = ("_waiter", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the call, or let its next wait return at once."""
        self.is_set = True
        if self._waiter is not None:
            _resolve(self._waiter)

    def clear(self) -> None:
        """Wait anew for what comes from now on."""
        self.is_set = False

    def begin(self) -> asyncio.Future[None]:
        """Begin to wait: what `set` resolves."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def end(self) -> None:
        """Wait no longer."""
        self._waiter = None


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def park(wake: Wake, deadline: float, *, clock: Clock, draining: Draining) -> bool:
    """Wait until `wake` is set (True) or domain time `deadline` has come (False).

    Raises UNAVAILABLE / DRAINING if the service stops first. The caller clears it, so that what happens while it
    is busy is not missed and many changes wake it once.
    """
    draining.check()
    if wake.is_set:
        return True
    if deadline <= clock.now():
        return False
    waiter = wake.begin()
    draining.park(waiter)
    timer = clock.call_at(deadline, partial(_resolve, waiter))
    try:
        await waiter
    finally:
        timer.cancel()
        draining.unpark(waiter)
        wake.end()
    if wake.is_set:
        return True
    draining.check()
    return False
