"""Pushes membership to the sinks.

Invariants: a sink gets the newest membership, whole, and never an older one after it; a sink that fails or hangs is
told again until it takes it, and holds up no other; HELD members are named to sinks that hold, and to no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from services.engine.changes import Changes
from services.engine.domain.spec import Route
from services.engine.fleet import Fleet
from services.engine.sinks.base import Member, Membership, RouteSink
from services.runtime.errors import TurnoutError
from services.runtime.logs import get_logger
from services.runtime.tasks import Supervisor

PUSH_S: Final = 2.0
"""Wall seconds for one push."""

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 8.0
"""Between two pushes to a sink that fails."""

SETTLE_S: Final = 1.0
"""Wall seconds that a reclaim waits for the sinks: requests that still come are ended by the pause."""

_LOG = get_logger("engine")


class Publisher:
    """All sinks of a controller. `describe` tells run and incarnation."""

    def __init__(
        self, fleet: Fleet, sinks: Sequence[RouteSink], tasks: Supervisor, describe: Callable[[], tuple[str, str]]
    ) -> None:
        self._fleet = fleet
        self._sinks = tuple(sinks)
        self._tasks = tasks
        self._describe = describe
        self._taken = {sink.name: -1 for sink in sinks}
        self._sessions = {sink.name: 0 for sink in sinks}
        self._progress = Changes()

    def start(self) -> None:
        """Begin to push."""
        for sink in self._sinks:
            self._tasks.spawn(f"routes to {sink.name}", self._loop(sink))

    @property
    def current(self) -> dict[str, bool]:
        """Whether each sink has taken the present membership."""
        return {name: version >= self._fleet.routes.version for name, version in self._taken.items()}

    async def settled(self) -> None:
        """Wait until every sink has taken the membership of now, for `SETTLE_S` at most."""
        wanted = self._fleet.routes.version
        try:
            async with asyncio.timeout(SETTLE_S):
                while any(version < wanted for version in self._taken.values()):
                    await self._progress.beyond(self._progress.version)
        except TimeoutError:
            behind = [name for name, version in self._taken.items() if version < wanted]
            _LOG.warning("routes not taken in time", sinks=behind)

    async def close(self) -> None:
        """Let go of the sinks."""
        for sink in self._sinks:
            try:
                await sink.close()
            except TurnoutError as error:
                _LOG.warning("route sink not closed", sink=sink.name, reason=error.reason)

    async def _loop(self, sink: RouteSink) -> None:
        pause = FIRST_PAUSE_S
        while True:
            membership = self.membership(sink)
            if await self._push(sink, membership):
                pause = FIRST_PAUSE_S
                self._sessions[sink.name] = membership.sessions_cleared
                self._taken[sink.name] = membership.version
                self._progress.notify()
                await self._fleet.routes.beyond(membership.version)
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _push(self, sink: RouteSink, membership: Membership) -> bool:
        try:
            async with asyncio.timeout(PUSH_S):
                await sink.push(membership)
        except TimeoutError:
            _LOG.warning("route sink does not answer", sink=sink.name)
        except TurnoutError as error:
            _LOG.warning("route sink failed", sink=sink.name, reason=error.message)
        except Exception:
            _LOG.exception("route sink failed unexpectedly", sink=sink.name)
        else:
            return True
        return False

    def membership(self, sink: RouteSink) -> Membership:
        """What this sink is told now."""
        run_id, incarnation = self._describe()
        members: list[Member] = []
        others: list[Member] = []
        held = False
        for slot in self._fleet.all:
            spec, route = slot.replica.spec, slot.replica.route
            held |= route is Route.HELD
            member = Member(slot.replica_id, spec.backend, spec.endpoint, spec.role, route)
            (members if route is Route.SERVING or (route is Route.HELD and sink.holds) else others).append(member)
        # A sink that cannot hold gets the lent replicas last, and only then can sessions be spread over them.
        cleared = self._sessions[sink.name] if held and not sink.holds else self._fleet.placement.cleared
        version = self._fleet.routes.version
        return Membership(run_id, incarnation, version, cleared, tuple(members), tuple(others))
