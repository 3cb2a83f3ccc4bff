"""How the owner of a journal goes on when it takes no more records.

Invariants: nothing is served from the failure until the owner and what is stored agree again; after a failed sync, and
if what is stored cannot be read, the process ends; whatever else fails is tried again until it succeeds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Final

from services.runtime.errors import Code, TurnoutError
from services.runtime.journal.journal import Journal, JournalState
from services.runtime.logs import get_logger
from services.runtime.tasks import Tick

EXIT_FAILED: Final = 1

RETRY_S: Final = 1.0
"""Wall seconds between two attempts, for example while the disk is full: it tells nobody when it has room."""


class Mending:
    """Mends one service. `suspend` stops serving, `agree` brings memory and the opened journal together (and raises
    TurnoutError or OSError if it cannot yet), `go_on` serves again."""

    def __init__(
        self,
        name: str,
        suspend: Callable[[], Awaitable[None]],
        agree: Callable[[Journal], Awaitable[None]],
        go_on: Callable[[], None],
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._suspend = suspend
        self._agree = agree
        self._go_on = go_on
        self._exit = exit_process
        self._log = get_logger(name)

    async def watch(self, journal: Journal, tick: Tick) -> None:
        """Mend whenever a commit fails; never returns."""
        while True:
            tick()
            failure = await journal.failed()
            await self._suspend()
            if failure.fatal:
                self.end(failure.error)
            self._log.error("a commit failed; nothing is served until memory and disk agree", error=str(failure.error))
            while not await self._mended(journal):  # noqa: ASYNC110 - the disk tells nobody when it has room
                await asyncio.sleep(RETRY_S)
            self._go_on()

    async def _mended(self, journal: Journal) -> bool:
        try:
            if journal.state is JournalState.FAILED:
                await journal.reopen()
            await self._agree(journal)
        except (TurnoutError, OSError) as error:
            lost = isinstance(error, TurnoutError) and error.code is Code.DATA_LOSS
            if journal.state is JournalState.FATAL or lost:
                self.end(error)
            self._log.error("memory and disk do not agree yet", error=str(error))
            # What was read before it failed may not be served.
            await self._suspend()
            return False
        return True

    def end(self, error: Exception) -> None:
        """The disk cannot be trusted, or not be read."""
        self._log.critical("nothing can be said about what is on the disk; this process ends", error=str(error))
        self._exit(EXIT_FAILED)
