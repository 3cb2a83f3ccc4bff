"""A service whose garbage collector runs all the time, and whose background loops each fail once.

    python -P -m tests.deployed.merciless SERVICE serve ARGUMENTS...

Invariant: nothing else of it is changed: the command is the one that is deployed.
"""

from __future__ import annotations

import gc
import runpy
import sys
import threading
import time
from collections.abc import Awaitable, Callable

from services.runtime.tasks import Supervisor, Tick

EVERY_S = 0.01
Loop = Callable[[Tick], Awaitable[None]]


def _collect() -> None:
    while True:
        gc.collect()
        time.sleep(EVERY_S)


def _fail_once() -> None:
    supervise = Supervisor.supervise

    def supervised(self: Supervisor, name: str, loop: Loop, *, restart_after_s: float = 1.0) -> None:
        lives = 0

        async def failing(tick: Tick) -> None:
            nonlocal lives
            lives += 1
            print(f"life {lives} of {name}", file=sys.stderr, flush=True)
            if lives == 1:
                raise RuntimeError("injected")
            await loop(tick)

        supervise(self, name, failing, restart_after_s=restart_after_s)

    Supervisor.supervise = supervised  # type: ignore[method-assign]


def main() -> None:
    """Become the command."""
    gc.set_threshold(1)
    _fail_once()
    threading.Thread(target=_collect, daemon=True).start()
    sys.argv = ["turnout", *sys.argv[1:]]
    runpy.run_module("services.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
