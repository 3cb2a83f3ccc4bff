"""Running a coroutine as a command.

Invariants: Ctrl-C and SIGTERM cancel the command, which then cleans up; Ctrl-C ends as KeyboardInterrupt, SIGTERM as
exit code 143.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import click
import uvloop

T = TypeVar("T")

EXIT_TERMINATED: Final = 128 + signal.SIGTERM


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on an event loop of its own and return what it returns."""
    terminated = False

    async def main() -> T:
        nonlocal terminated
        task = asyncio.current_task()
        assert task is not None

        def on_sigterm() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main())
        except asyncio.CancelledError:
            if terminated:
                raise click.exceptions.Exit(EXIT_TERMINATED) from None
            raise


async def until_stopped() -> None:
    """Return at the first SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
