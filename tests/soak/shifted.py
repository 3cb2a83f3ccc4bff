"""Run a module with another monotonic clock, as after a reboot of the machine.

    python -P -m tests.soak.shifted SECONDS MODULE [ARGS...]

Needs the right to make a time namespace; without it the clock stays, and the module runs all the same.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

_CLONE_NEWTIME: Final = 0x80
"""From linux/sched.h."""

_OFFSETS: Final = "timens_offsets"


def shift_of(pid: int) -> int:
    """Return by how many seconds the monotonic clock of a process is shifted."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/{_OFFSETS}").read_text().split()[1])
    return 0


def main() -> None:
    """Shift the clock, then become the module named on the command line."""
    seconds, *command = sys.argv[1:]
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWTIME) == 0:
        with suppress(OSError):
            Path(f"/proc/self/{_OFFSETS}").write_text(f"monotonic {seconds} 0\nboottime {seconds} 0\n")
    # The new namespace holds from the next program on.
    os.execv(sys.executable, [sys.executable, "-P", "-m", *command])


if __name__ == "__main__":
    main()
