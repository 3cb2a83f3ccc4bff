"""The one sleeper for all that ends by itself: it sleeps through nothing, and does not spin."""

from __future__ import annotations

import asyncio

from services.buffer.alarm import Alarm
from services.runtime.clock import ManualClock


async def slept(sleeper: asyncio.Task[None]) -> bool:
    """Whether the sleeper is awake after some turns of the event loop."""
    for _ in range(5):
        await asyncio.sleep(0)
    return sleeper.done()


async def test_an_earlier_time_wakes_the_sleeper_and_a_later_one_does_not() -> None:
    """A claim of a second that begins while the alarm sleeps towards a lease of ten minutes has to end in a second."""
    clock, alarm = ManualClock(), Alarm()
    begun = clock.now()
    sleeper = asyncio.create_task(alarm.sleep(clock, lambda: begun + 10.0))
    assert not await slept(sleeper)
    for due in (None, begun + 10.0, begun + 11.0):
        alarm.set(due)
        assert not await slept(sleeper)
    alarm.set(begun + 9.0)
    assert await slept(sleeper)


async def test_it_sleeps_until_the_time_or_until_there_is_one() -> None:
    """What is set while nothing is due wakes it, whatever the time; what is due already costs one turn, not a timer."""
    clock, alarm = ManualClock(), Alarm()
    begun = clock.now()
    sleeper = asyncio.create_task(alarm.sleep(clock, lambda: None))
    assert not await slept(sleeper)
    alarm.set(begun + 1e9)
    assert await slept(sleeper)
    sleeper = asyncio.create_task(alarm.sleep(clock, lambda: begun + 2.0))
    await clock.advance(1.5)
    assert not await slept(sleeper)
    await clock.advance(0.5)
    assert await slept(sleeper)
    assert await slept(asyncio.create_task(alarm.sleep(clock, lambda: begun)))
