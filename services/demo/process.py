"""How a process of the demo runs and ends.

Invariants: a failure is one line on stderr and exit code 1, with a traceback only where TURNOUT_DEBUG is set.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any

import uvloop


def run_process(name: str, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end; exits with 1 if it fails."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
    except Exception as error:
        if os.environ.get("TURNOUT_DEBUG"):
            raise
        text = " ".join(str(error).split())
        print(f"{name}: {type(error).__name__}: {text}", file=sys.stderr, flush=True)
        sys.exit(1)
