"""Commands and deaths of engines as they are counted for the metrics."""

from __future__ import annotations

import asyncio

import pytest

from services.engine.domain.calls import Drain, WakeUp
from services.engine.tally import Tally
from services.runtime.errors import unavailable
from tests.engine.helpers import register, running


def test_commands_are_counted_by_name_failed_ones_too() -> None:
    """A wake-up that fails after a minute is the one that somebody looks for."""
    tally = Tally()
    with tally.command(WakeUp(frozenset({"weights"}))):
        pass
    with pytest.raises(ValueError, match="no"), tally.command(WakeUp(frozenset({"weights"}))):
        raise ValueError("no")
    with pytest.raises(asyncio.CancelledError), tally.command(Drain()):
        raise asyncio.CancelledError
    wakes = tally.commands["wake_up"]
    assert (wakes.count, wakes.failures) == (2, 1)
    assert wakes.seconds > 0
    assert tally.commands["drain"].failures == 1


async def test_a_death_is_counted_once() -> None:
    """Every probe of a dead engine fails; an alert on repeated deaths must not fire for one."""
    async with running() as engine:
        await register(engine, "s0", "standalone")
        slot = engine.controller.fleet.get("s0")
        for _ in range(3):
            slot.note_failure(unavailable("ENGINE_DEAD", "it exited"))
        assert slot.tally.deaths == 1
