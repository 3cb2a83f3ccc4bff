"""Calls from other threads to the event loop that owns what they read.

Invariant: a coroutine is made on the loop alone, so that one which has stopped or closed leaves none behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Call on `loop`, which another thread runs, and give its answer back; what it raises comes out here.

    Raises TimeoutError after so many wall seconds, when the call is cancelled, and RuntimeError if the loop has closed
    or closes meanwhile.
    """
    answer: Future[T] = Future()
    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        try:
            answer.set_result(await call())
        except asyncio.CancelledError:
            answer.set_exception(RuntimeError("the event loop has ended"))
            raise
        except Exception as error:
            answer.set_exception(error)

    def begin() -> None:
        if answer.set_running_or_notify_cancel():
            tasks.append(loop.create_task(run()))

    def give_up() -> None:
        for task in tasks:
            task.cancel()

    loop.call_soon_threadsafe(begin)
    try:
        return answer.result(seconds)
    except TimeoutError:
        if not answer.cancel():
            loop.call_soon_threadsafe(give_up)
        raise
