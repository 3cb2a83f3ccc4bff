"""Watches whether the engines answer.

Invariants: every replica is probed every `interval` wall seconds, and at once when somebody suspects it; probing one
never waits for another. So a replica that hangs or dies is known within `interval` + the probe's time limit.
"""

from __future__ import annotations

import asyncio
from typing import Final

from services.engine.domain.spec import Health
from services.engine.fleet import Fleet
from services.engine.slot import Slot
from services.runtime.host import HostContext
from services.runtime.logs import get_logger

SHORTEST_PAUSE_S: Final = 0.05
"""Between two probes of a replica that is suspected over and over, so that a broken one costs little."""


_LOG = get_logger("engine")


class Prober:
    """One background task per replica."""

    def __init__(self, fleet: Fleet, context: HostContext, interval: float) -> None:
        self._fleet = fleet
        self._context = context
        self._interval = interval
        self.suspended = False

    def watch(self, slot: Slot) -> None:
        """Probe a replica until it is deregistered."""
        self._context.tasks.spawn(f"probe {slot.replica_id}", self._loop(slot))

    async def _loop(self, slot: Slot) -> None:
        while self._fleet.holds(slot):
            try:
                async with asyncio.timeout(self._interval):
                    await slot.probe_wanted.wait()
            except TimeoutError:
                pass
            slot.probe_wanted.clear()
            if self._fleet.holds(slot):
                try:
                    await slot.probe_in_background()
                except Exception:
                    # A replica that nobody probes would keep its route for ever.
                    _LOG.exception("probe failed unexpectedly", replica_id=slot.replica_id)
                self.report()
                await asyncio.sleep(SHORTEST_PAUSE_S)

    def report(self) -> None:
        """Tell gRPC health: NOT_SERVING while suspended, or while there are replicas and none of them answers."""
        slots = self._fleet.all
        answers = not slots or any(slot.replica.health is Health.HEALTHY for slot in slots)
        self._context.set_serving(answers and not self.suspended)
