"""Run a module as a program that ends when its parent does.

    python -P -m services.processes.leash MODULE [ARGS...]

Invariants: a parent that is killed outright leaves no child behind: the child gets SIGTERM and drains as usual. Nothing
else about the module changes: its arguments, exit code and signals are its own.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""

_LOOK_EVERY_S = 1.0
"""Only where the kernel cannot tell us; a second is soon enough for an orphan and costs nothing."""


def _tie_to_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        # It went before the tie was made.
        os.kill(os.getpid(), signal.SIGTERM)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Tie this process to its parent, then become the module named on the command line."""
    module, arguments = sys.argv[1], sys.argv[2:]
    _tie_to_parent(os.getppid())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
