"""Background tasks that cannot vanish.

Invariants: every task is held by a strong reference until it ends; a loop that raises or returns is logged and started
again after a pause, so it stops only with its supervisor; `close` cancels all and waits until they are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from services.runtime.clock import Clock
from services.runtime.errors import describe
from services.runtime.logs import get_logger

T = TypeVar("T")

Tick = Callable[[], None]
"""Called by a loop at each of its turns: it is alive."""


async def together(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """What each of them returns; once one fails the others are cancelled, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(slots=True)
class LoopStatus:
    """How a supervised loop fares. `last_tick` is in domain seconds; None before the first."""

    name: str
    running: bool = False
    last_tick: float | None = None
    restarts: int = 0
    last_error: str = ""


class Supervisor:
    """Holds the background tasks of one service."""

    def __init__(self, *, name: str, clock: Clock) -> None:
        self._log = get_logger(name)
        self._clock = clock
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: dict[str, LoopStatus] = {}
        self._closed = False

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `coroutine` once. Whoever awaits the task gets its result; a failure is logged in any case."""
        if self._closed:
            coroutine.close()
            raise RuntimeError(f"cannot start {name}: the supervisor is closed")
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def supervise(self, name: str, loop: Callable[[Tick], Awaitable[None]], *, restart_after_s: float = 1.0) -> None:
        """Keep `loop` running: when it raises or returns, log that and start it again after `restart_after_s`.

        The pause is in domain seconds. `loop` gets a function to call at each turn, for `status`.
        """
        if name in self._loops:
            raise ValueError(f"a loop named {name} is supervised already")
        self._loops[name] = LoopStatus(name)
        self.spawn(name, self._keep_running(self._loops[name], loop, restart_after_s))

    def every(self, name: str, period_s: float, step: Callable[[], Awaitable[None] | None]) -> None:
        """Call `step` now and then every `period_s` domain seconds; a step that raises is logged and tried again."""

        async def loop(tick: Tick) -> None:
            while True:
                pending = step()
                if pending is not None:
                    await pending
                tick()
                await self._clock.sleep(period_s)

        self.supervise(name, loop, restart_after_s=period_s)

    def status(self) -> list[LoopStatus]:
        """Return how each supervised loop fares."""
        return list(self._loops.values())

    async def close(self) -> None:
        """Cancel every task and wait until all are gone."""
        self._closed = True
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    async def _keep_running(
        self, status: LoopStatus, loop: Callable[[Tick], Awaitable[None]], restart_after_s: float
    ) -> None:
        def tick() -> None:
            status.last_tick = self._clock.now()

        task = asyncio.current_task()
        assert task is not None
        while True:
            status.running = True
            try:
                await loop(tick)
                status.last_error = "it returned"
                self._log.error("background loop returned; restarting", loop=status.name)
            except (Exception, asyncio.CancelledError) as error:
                if task.cancelling():
                    raise
                # A cancellation that nobody asked of this task leaked out of something the loop awaited.
                status.last_error = describe(error)
                self._log.exception("background loop failed; restarting", loop=status.name)
            finally:
                status.running = False
            status.restarts += 1
            await self._clock.sleep(restart_after_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("background task failed", task=task.get_name(), exc_info=error)
