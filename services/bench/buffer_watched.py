"""The replay buffer as `serve` runs it, with a watchdog on its event loop.

    python -P -m services.bench.buffer_watched --listen ... --data-dir ...

Invariants: a timer of 1 ms notes how late it ran at worst; SIGUSR1 prints that in seconds as `worst <seconds>` and
begins anew. The watchdog lives on the loop that it watches, so nothing but that loop can make it late.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import Final

from services.buffer.service import NAME, BufferService
from services.buffer.settings import BufferSettings
from services.runtime.host import HostContext
from services.runtime.options import settings_command
from services.runtime.process import run_service
from services.runtime.tasks import Tick

PERIOD_S: Final = 0.001


class Watchdog:
    """Measures the loop it runs on."""

    def __init__(self) -> None:
        self._worst = 0.0

    async def run(self, tick: Tick) -> None:
        """Never returns."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._tell)
        while True:
            due = time.perf_counter() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._worst = max(self._worst, time.perf_counter() - due)
            tick()

    def _tell(self) -> None:
        print(f"worst {self._worst:.6f}", flush=True)
        self._worst = 0.0


class WatchedBuffer(BufferService):
    """The buffer with a watchdog."""

    def __init__(self, context: HostContext, settings: BufferSettings) -> None:
        super().__init__(context, settings)
        self._tasks = context.tasks

    async def start(self) -> None:
        """Watch from the time on when calls are answered: nobody waits before."""
        await super().start()
        self._tasks.supervise("watchdog", Watchdog().run)


@settings_command(BufferSettings, name="buffer_watched", help="Run the watched buffer.")
def main(settings: BufferSettings) -> int:
    """Run the service."""
    return run_service(NAME, settings, lambda context: WatchedBuffer(context, settings))


if __name__ == "__main__":
    sys.exit(main())
