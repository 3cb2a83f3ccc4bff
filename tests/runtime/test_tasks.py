"""Background loops that cannot vanish."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from structlog.testing import capture_logs

from services.runtime.clock import ManualClock
from services.runtime.tasks import Supervisor, Tick


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def supervisor(clock: ManualClock) -> Supervisor:
    return Supervisor(name="test", clock=clock)


async def test_h60_loops_survive_garbage_collection(clock: ManualClock, supervisor: Supervisor) -> None:
    """The event loop holds tasks weakly: one that nobody refers to can be collected between two ticks."""
    supervisor.every("sweeper", 1.0, lambda: None)
    supervisor.every("prober", 1.0, lambda: asyncio.sleep(0))
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(30):
            await clock.advance(1)
            gc.collect()
    finally:
        gc.set_threshold(*before)
    assert [(loop.name, loop.last_tick, loop.running) for loop in supervisor.status()] == [
        ("sweeper", 30.0, True),
        ("prober", 30.0, True),
    ]
    await supervisor.close()


async def test_h60_a_loop_that_fails_is_logged_and_goes_on(clock: ManualClock, supervisor: Supervisor) -> None:
    """One exception would otherwise end a sweeper for good, and leases would never run out again."""
    failures = [RuntimeError("disk"), None, None]
    with capture_logs() as logs:

        def step() -> None:
            failure = failures.pop(0) if failures else None
            if failure:
                raise failure

        supervisor.every("sweeper", 2.0, step)
        await clock.advance(0)
        (status,) = supervisor.status()
        assert (status.running, status.restarts, status.last_tick) == (False, 1, None)
        assert status.last_error == "RuntimeError: disk"
        await clock.advance(4)
    assert (status.running, status.last_tick) == (True, 4.0)
    assert [entry["loop"] for entry in logs if entry["log_level"] == "error"] == ["sweeper"]
    await supervisor.close()


async def test_h60_a_loop_that_returns_is_started_again(clock: ManualClock, supervisor: Supervisor) -> None:
    """A stray `return` is as silent an end as an exception that nobody retrieves."""
    begun: list[float] = []

    async def loop(tick: Tick) -> None:
        begun.append(clock.now())
        tick()

    with capture_logs() as logs:
        supervisor.supervise("refill", loop, restart_after_s=3)
        await clock.advance(7)
    assert begun == [0, 3, 6]
    assert len(logs) == 3
    await supervisor.close()


async def test_h60_a_loop_survives_a_cancellation_that_was_meant_for_something_else(
    clock: ManualClock, supervisor: Supervisor
) -> None:
    """A call that is cancelled under the loop raises CancelledError in it: as silent an end as any, without a log."""
    begun: list[float] = []

    async def loop(tick: Tick) -> None:
        begun.append(clock.now())
        call = asyncio.get_running_loop().create_future()
        call.cancel()
        await call

    with capture_logs() as logs:
        supervisor.supervise("prober", loop, restart_after_s=3)
        await clock.advance(4)
    assert begun == [0, 3]
    assert len(logs) == 2
    await supervisor.close()


async def test_h60_nothing_is_pending_after_close(clock: ManualClock, supervisor: Supervisor) -> None:
    """ "Task was destroyed but it is pending" at exit means that clean-up never ran."""
    cleaned: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("stubborn")

    supervisor.every("sweeper", 1.0, lambda: None)
    supervisor.spawn("stubborn", stubborn())
    await clock.advance(1)
    await supervisor.close()
    assert cleaned == ["stubborn"]
    assert clock.pending == 0
    with warnings.catch_warnings(record=True) as caught:
        gc.collect()
    assert not caught
    with pytest.raises(RuntimeError, match="closed"):
        supervisor.spawn("late", stubborn())


async def test_a_task_that_fails_is_logged_even_if_nobody_waits(supervisor: Supervisor) -> None:
    """Fire and forget must not mean forget."""

    async def fail() -> None:
        raise ValueError("lost")

    with capture_logs() as logs:
        await asyncio.gather(supervisor.spawn("job", fail()), return_exceptions=True)
        await asyncio.sleep(0)
    assert [entry["task"] for entry in logs] == ["job"]


async def test_two_loops_of_one_name_are_refused(supervisor: Supervisor) -> None:
    """Their status could not be told apart."""
    supervisor.every("sweeper", 1.0, lambda: None)
    with pytest.raises(ValueError, match="sweeper"):
        supervisor.every("sweeper", 1.0, lambda: None)
    await supervisor.close()
