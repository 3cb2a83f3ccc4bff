"""How long a call may be parked."""

from __future__ import annotations

import asyncio
import math

import pytest
from google.protobuf.duration_pb2 import Duration

from services.runtime.clock import ManualClock, MonotonicClock
from services.runtime.draining import Draining
from services.runtime.errors import Code, TurnoutError
from services.runtime.waits import MAX_WAIT_S, Wake, deadline_after, duration_of, duration_seconds, park, wait_budget


@pytest.mark.parametrize(
    ("max_wait", "remaining", "budget"),
    [
        (None, None, MAX_WAIT_S),
        (5.0, None, 5.0),
        (5.0, 2.0, 1.9),
        (1.0, 2.0, 1.0),
        (None, 2.0, 1.9),
        (5.0, 0.05, 0.0),
        (0.0, 9.0, 0.0),
        (1e18, None, MAX_WAIT_S),
        (math.inf, None, MAX_WAIT_S),
    ],
)
def test_a_wait_ends_before_its_callers_deadline(
    max_wait: float | None, remaining: float | None, budget: float
) -> None:
    """Parked up to the deadline itself, the answer TIMED_OUT would lose the race against DEADLINE_EXCEEDED."""
    assert wait_budget(max_wait, remaining) == pytest.approx(budget)


@pytest.mark.parametrize("value", [-0.1, math.nan, -math.inf])
def test_impossible_waits_are_refused_by_name(value: float) -> None:
    """A negative wait would return at once or never, depending on who subtracts first."""
    with pytest.raises(TurnoutError) as caught:
        wait_budget(value, None, field="max_wait")
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.metadata["field"] == "max_wait"


def test_durations_are_read_exactly_and_bounded() -> None:
    """10**18 seconds fit into a Duration's field and would overflow a timer."""
    assert duration_seconds(Duration(seconds=1, nanos=500_000_000), "max_wait") == 1.5
    assert duration_seconds(Duration(seconds=10**18), "max_wait") == MAX_WAIT_S
    with pytest.raises(TurnoutError, match="max_wait must not be negative"):
        duration_seconds(Duration(nanos=-1), "max_wait")


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.9999999999, 86400.5, -0.25])
def test_durations_are_written_to_the_nanosecond(seconds: float) -> None:
    """Rounded up to a whole second, the nanoseconds would leave their range and the message would be invalid."""
    written = duration_of(seconds)
    assert abs(written.nanos) < 10**9
    assert written.seconds + written.nanos / 1e9 == pytest.approx(seconds, abs=1e-9)


def test_deadlines_are_wall_time_whatever_the_scale() -> None:
    """A time scale must not stretch or shrink how long a call stays open."""
    clock = MonotonicClock(scale=0.01)
    assert deadline_after(clock, 2.0) - clock.now() == pytest.approx(200, rel=0.01)


async def test_a_parked_wait_ends_with_its_event() -> None:
    """The event is what it waits for; the deadline only bounds it."""
    clock, draining, event = ManualClock(), Draining(), Wake()
    wait = asyncio.create_task(park(event, 10, clock=clock, draining=draining))
    await clock.advance(9)
    assert not wait.done()
    event.set()
    assert await wait is True
    assert clock.pending == 0, "the deadline's timer stayed behind"


async def test_a_parked_wait_ends_at_its_deadline() -> None:
    """Nothing happens, and the wait still comes back."""
    clock, draining = ManualClock(), Draining()
    wait = asyncio.create_task(park(Wake(), 10, clock=clock, draining=draining))
    await clock.advance(10)
    assert await wait is False


async def test_a_wait_of_nothing_looks_once() -> None:
    """max_wait = 0 means: tell me now."""
    clock, draining, event = ManualClock(), Draining(), Wake()
    assert await park(event, 0, clock=clock, draining=draining) is False
    event.set()
    assert await park(event, 0, clock=clock, draining=draining) is True


async def test_h50_a_parked_wait_ends_when_the_service_drains() -> None:
    """A wait that only its event could end would hold up a stop until the grace is over."""
    clock, draining = ManualClock(), Draining()
    wait = asyncio.create_task(park(Wake(), 10, clock=clock, draining=draining))
    await clock.advance(1)
    draining.set()
    with pytest.raises(TurnoutError) as caught:
        await wait
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "DRAINING")
    with pytest.raises(TurnoutError):
        await park(Wake(), 10, clock=clock, draining=draining)


async def test_a_race_against_draining_cancels_the_loser() -> None:
    """Work that nobody waits for any more must not go on behind the caller's back."""
    draining = Draining()
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def done() -> int:
        return 7

    assert await draining.race(done()) == 7
    race = asyncio.create_task(draining.race(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    draining.set()
    with pytest.raises(TurnoutError):
        await race
    assert cancelled.is_set()
