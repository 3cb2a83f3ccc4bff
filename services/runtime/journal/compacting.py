"""Snapshots in place of a log that has grown long.

Invariant: one that fails is told and costs nothing else: the log is as it was, and grows on until another is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from structlog.typing import FilteringBoundLogger

from services.runtime.errors import TurnoutError
from services.runtime.journal.mending import RETRY_S
from services.runtime.tasks import Tick


async def compact_when_due(
    due: asyncio.Event,
    snapshot: Callable[[], Awaitable[None]],
    log: FilteringBoundLogger,
    tick: Tick,
    *,
    still: Callable[[], bool],
) -> None:
    """Take a snapshot whenever `due` was set, and `still` says so; never returns."""
    while True:
        await due.wait()
        due.clear()
        # It was asked for all through the last snapshot, since the log is as long until that is there.
        if not still():
            continue
        begun = time.perf_counter()
        try:
            await snapshot()
        except TurnoutError as error:
            log.error("could not take a snapshot", error=str(error))
            await asyncio.sleep(RETRY_S)
        else:
            log.info("took a snapshot", seconds=round(time.perf_counter() - begun, 3))
        tick()
