"""Watches whether the engines answer.

Invariants: every replica is probed every `interval` wall seconds, and at once when somebody suspects it or its engine
shows a sign of death; probing one never waits for another. So an idle engine that dies is known within a second, one
that hangs within `interval` + the probe's time limit. An engine that somebody started on GPUs of the trainer is
freed when a probe shows it, and again until it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from services.engine.domain.spec import Health
from services.engine.fleet import Fleet
from services.engine.slot import Slot
from services.engine.wire.replicas import health_name
from services.runtime.errors import TurnoutError
from services.runtime.host import HostContext
from services.runtime.logs import get_logger

SHORTEST_PAUSE_S: Final = 0.05
"""Between two probes of a replica that is suspected over and over, so that a broken one costs little."""

DOUBT_S: Final = 0.5
"""Until the next probe of an engine that showed a sign of death and answers all the same: it may be about to stop."""

_LOG = get_logger("engine")


class Prober:
    """One background task per replica. `free` frees a stray engine; None where that is for others to say."""

    def __init__(
        self, fleet: Fleet, context: HostContext, interval: float, free: Callable[[Slot], Awaitable[None]] | None
    ) -> None:
        self._fleet = fleet
        self._free = free
        self._strays: dict[str, str] = {}
        """Why engines could not be freed when it was tried last."""
        self._context = context
        self._interval = interval
        self.suspended = False

    def watch(self, slot: Slot) -> None:
        """Probe a replica until it is deregistered."""
        self._report_replicas()
        self._context.tasks.spawn(f"probe {slot.replica_id}", self._loop(slot))

    async def _loop(self, slot: Slot) -> None:
        doubted = False
        freeing: asyncio.Task[None] | None = None
        while self._fleet.holds(slot):
            if self._free is not None and slot.replica.stray and (freeing is None or freeing.done()):
                # Beside the probes, which have to go on if it hangs in this.
                freeing = self._context.tasks.spawn(f"free {slot.replica_id}", self._free_stray(slot, self._free))
            signed = await self._due(slot, doubted)
            slot.probe_wanted.clear()
            if self._fleet.holds(slot):
                try:
                    await slot.probe_in_background()
                except Exception:
                    # A replica that nobody probes would keep its route for ever.
                    _LOG.exception("probe failed unexpectedly", replica_id=slot.replica_id)
                self.report()
                doubted = signed and slot.replica.health is Health.HEALTHY
                await asyncio.sleep(SHORTEST_PAUSE_S)

    async def _free_stray(self, slot: Slot, free: Callable[[Slot], Awaitable[None]]) -> None:
        replica_id, failure = slot.replica_id, ""
        try:
            await free(slot)
        except TurnoutError as error:
            failure = error.reason
        # One that cannot be freed is tried at every probe: it is told once.
        if failure != self._strays.get(replica_id):
            _LOG.warning("an engine was started on GPUs of the trainer", replica_id=replica_id, not_freed=failure)
        self._strays[replica_id] = failure
        if not failure:
            del self._strays[replica_id]

    async def _due(self, slot: Slot, doubted: bool) -> bool:
        """Wait until a probe is due; returns whether that is for a sign of death."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(slot.probe_wanted.wait())]
        if not doubted and slot.replica.health is Health.HEALTHY:
            waits.append(asyncio.ensure_future(slot.watch()))
        timeout = min(self._interval, DOUBT_S) if doubted else self._interval
        try:
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return any(wait.done() for wait in waits[1:])
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def report(self) -> None:
        """Tell gRPC health: NOT_SERVING while suspended, or while there are replicas and none of them answers."""
        slots = self._fleet.all
        answers = not slots or any(slot.replica.health is Health.HEALTHY for slot in slots)
        self._context.set_serving(answers and not self.suspended)
        self._report_replicas()

    def _report_replicas(self) -> None:
        healths = {health_name(slot.replica_id): slot.replica.health is Health.HEALTHY for slot in self._fleet.all}
        self._context.set_parts(healths)
