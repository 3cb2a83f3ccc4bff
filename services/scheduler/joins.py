"""A trainer's calls as tasks of the run.

Invariants: a call's work runs in a task that the run owns, so a dropped call cancels nothing; a repeat joins the work
under way; the calls of a run are worked on one after the other; a failure is not kept, so the next repeat tries anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from services.scheduler.domain.calls import CallKey, call_changed

T = TypeVar("T")


class Joins:
    """The work under way for one run."""

    def __init__(self) -> None:
        self._tasks: dict[CallKey, tuple[bytes, asyncio.Task[Any]]] = {}
        self._turn = asyncio.Lock()

    def start(self, key: CallKey, content: bytes, work: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """The task that does `work` for `key`, begun now unless the same call is under way.

        `content` stands for all that the call said; other content raises INVALID_ARGUMENT / CALL_CHANGED. Await the
        task through asyncio.shield.
        """
        if key in self._tasks:
            first_content, task = self._tasks[key]
            if first_content != content:
                raise call_changed(key)
            return task
        task = asyncio.get_running_loop().create_task(self._in_turn(work), name=str(key))
        self._tasks[key] = (content, task)
        task.add_done_callback(lambda ended: self._ended(key, ended))
        return task

    def __contains__(self, key: CallKey) -> bool:
        """Whether the work of `key` is under way."""
        return key in self._tasks

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        while self._tasks:
            await asyncio.wait([task for _, task in self._tasks.values()])

    async def cancel(self) -> None:
        """End everything that is under way."""
        for _, task in list(self._tasks.values()):
            task.cancel()
        await self.idle()

    async def _in_turn(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._turn:
            return await work()

    def _ended(self, key: CallKey, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(key, (b"", None))[1] is task:
            del self._tasks[key]
        if not task.cancelled():
            # Whoever called may be gone; an error that nobody reads must not be reported as lost.
            task.exception()
