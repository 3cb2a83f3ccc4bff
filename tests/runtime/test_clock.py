"""Time that is handed in."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.runtime.clock import ManualClock, MonotonicClock


async def test_manual_time_wakes_sleepers_in_order_of_time() -> None:
    """A test that advances past two times must see them as they would really come, one after the other."""
    clock = ManualClock()
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        seen.append((name, clock.now()))

    tasks = [asyncio.create_task(sleeper(name, seconds)) for name, seconds in (("late", 3), ("soon", 1), ("next", 1))]
    await clock.advance(5)
    assert seen == [("soon", 1), ("next", 1), ("late", 3)]
    assert clock.now() == 5
    await asyncio.gather(*tasks)


async def test_manual_time_wakes_a_loop_that_sleeps_again() -> None:
    """A periodic loop ticks once for each period that passes, not once for each advance."""
    clock = ManualClock()
    ticks: list[float] = []

    async def loop() -> None:
        while True:
            await clock.sleep(2)
            ticks.append(clock.now())

    task = asyncio.create_task(loop())
    await clock.advance(7)
    assert ticks == [2, 4, 6]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert clock.pending == 0


async def test_a_cancelled_timer_does_not_ring() -> None:
    """A wait that ended must not be ended a second time by its deadline."""
    clock = ManualClock()
    rang: list[str] = []
    clock.call_at(1, lambda: rang.append("kept"))
    clock.call_at(1, lambda: rang.append("cancelled")).cancel()
    assert clock.pending == 1
    await clock.advance_to(2)
    assert rang == ["kept"]
    assert clock.wall() == pytest.approx(1_700_000_002.0)


async def test_the_scale_shortens_domain_seconds() -> None:
    """At a scale of 0.001 a thousand domain seconds pass in about one wall second, for reading and for sleeping."""
    clock = MonotonicClock(scale=0.001)
    before, begun = clock.now(), time.monotonic()
    await clock.sleep(50)
    rang = asyncio.Event()
    clock.call_at(clock.now() + 50, rang.set)
    await rang.wait()
    assert clock.now() - before >= 99
    assert time.monotonic() - begun < 30


async def test_times_in_the_past_and_far_future_are_accepted() -> None:
    """An event loop refuses or overflows on 1e18 seconds; a caller may send it."""
    clock = MonotonicClock()
    rang = asyncio.Event()
    clock.call_at(clock.now() - 5, rang.set)
    clock.call_at(1e18, rang.clear).cancel()
    await rang.wait()
    await clock.sleep(-1)
    await ManualClock().sleep(0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_would_stop_time_is_refused(scale: float) -> None:
    """Division by zero or NaN would surface in a policy, far from its cause."""
    with pytest.raises(ValueError, match="time scale"):
        MonotonicClock(scale)
