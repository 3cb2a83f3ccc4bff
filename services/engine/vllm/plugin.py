"""A general plugin of vLLM: its engine processes end when the process that started them is gone.

vLLM's workers watch their engine core, and nothing watches for the core: after a crash or a kill of its owner it would
hold its device for ever.

Invariant: nothing happens in a process that was not started by `services.engine.vllm.async_llm`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Final

OWNER: Final = "TURNOUT_VLLM_OWNER"
"""Variable with the process id of the owner."""

LOOK_EVERY_S: Final = 1.0
"""Soon enough for memory that a trainer waits for, and costs nothing."""


def load() -> None:
    """Called by vLLM in each of its processes, sometimes more than once."""
    owner = os.environ.get(OWNER, "")
    name = f"owner {owner}"
    if not owner.isdecimal() or int(owner) == os.getpid() or any(t.name == name for t in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(int(owner),), name=name, daemon=True).start()


def _watch(owner: int) -> None:
    while _alive(owner):
        time.sleep(LOOK_EVERY_S)
    # Its own way of stopping asks the owner first.
    os.kill(os.getpid(), signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
