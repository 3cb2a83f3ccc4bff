"""One control call after the other, each with a deadline, none overtaken by the next.

Invariants: a call that is given up goes on in the engine, so it counts as under way until it really ends, and the next
waits for it or is refused; an engine that dies ends every call within `WATCH_S` plus the time of one check, also those
that vLLM would leave hanging for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from services.runtime.errors import TurnoutError, deadline_exceeded

T = TypeVar("T")

WATCH_S: Final = 0.25
"""Wall seconds between two looks at an engine that has not answered yet: a death is known within a second."""


class Line:
    """The control calls of one engine. `check` raises once the engine is dead."""

    def __init__(self, name: str, check: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._check = check
        self._running: asyncio.Task[Any] | None = None
        self._what = ""
        self._lock = asyncio.Lock()
        self._given_up = False
        self.begun = 0
        """How many calls have begun."""

    @property
    def busy(self) -> str:
        """Name of the call that is under way, empty if none is."""
        return self._what if self._running is not None and not self._running.done() else ""

    @property
    def overdue(self) -> bool:
        """Whether the call that is under way has been given up."""
        return bool(self.busy) and self._given_up

    async def call(self, what: str, work: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:
        """Make a call that may take `timeout` wall seconds.

        DEADLINE_EXCEEDED / ENGINE_TIMEOUT if it takes longer, DEADLINE_EXCEEDED / REPLICA_BUSY if an earlier one does.
        """
        until = time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._lock.acquire()
        except TimeoutError:
            raise self._busy() from None
        try:
            await self._check()
            if self.busy and not await self._ended(until):
                raise self._busy()
            task: asyncio.Task[T] = asyncio.create_task(work(), name=f"{self._name} {what}")
            # Whoever gives up does not look at how it ends.
            task.add_done_callback(_retrieve)
            self._running, self._what, self._given_up = task, what, False
            self.begun += 1
            try:
                if not await self._ended(until):
                    raise deadline_exceeded(
                        "ENGINE_TIMEOUT",
                        f"{what} of {self._name} did not end within {timeout:g} s",
                        replica_id=self._name,
                        call=what,
                    )
                return task.result()
            finally:
                self._given_up = not task.done()
        finally:
            self._lock.release()

    async def _ended(self, until: float) -> bool:
        """Wait for the call under way; False if it takes too long. Raises if the engine dies meanwhile."""
        running = self._running
        assert running is not None
        while not running.done():
            left = until - time.monotonic()
            if left <= 0:
                return False
            await asyncio.wait({running}, timeout=min(WATCH_S, left))
            if not running.done():
                try:
                    await self._check()
                except TurnoutError:
                    running.cancel()
                    raise
        return True

    def drop(self) -> None:
        """Forget the call that is under way: the engine is gone or let go of."""
        if self._running is not None:
            self._running.cancel()

    def _busy(self) -> TurnoutError:
        return deadline_exceeded(
            "REPLICA_BUSY",
            f"{self._what} of {self._name} is still under way",
            replica_id=self._name,
            call=self._what,
        )


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
