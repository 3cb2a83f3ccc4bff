"""Threads: where a journal waits for the disk, beside its writer.

Invariants: one thread reads, one does everything rare, in the order in which it was asked for; an error of the system
comes out as the error of Turnout that it means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from services.runtime.journal.failures import closed, failure_of

R = TypeVar("R")


class Threads:
    """The threads of one journal; made on its event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._reads = ThreadPoolExecutor(1, thread_name_prefix=f"{name} reads")
        self._rest = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def read(self, run: Callable[[], R]) -> R:
        """Run a read. Raises UNAVAILABLE / JOURNAL_CLOSED after `shut`, what an OSError means, or sqlite3.Error."""
        return await self._elsewhere(self._reads, run)

    async def aside(self, run: Callable[[], R]) -> R:
        """Run something rare. Raises as `read` does."""
        return await self._elsewhere(self._rest, run)

    def submit(self, run: Callable[[], R]) -> Future[R]:
        """Have something rare run behind all that was asked for; from any thread."""
        return self._rest.submit(run)

    def shut(self) -> None:
        """Take nothing new; what was asked for is still done."""
        self._reads.shutdown(wait=False)
        self._rest.shutdown(wait=False)

    async def _elsewhere(self, threads: ThreadPoolExecutor, run: Callable[[], R]) -> R:
        try:
            pending = self._loop.run_in_executor(threads, run)
        except RuntimeError:
            raise closed() from None  # The threads were shut down.
        try:
            return await pending
        except OSError as error:
            raise failure_of(error).error from error
