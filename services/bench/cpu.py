"""Processor time of other processes, from /proc.

Invariants: the time of all threads is counted, that of children is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the processor seconds (user and system) that these processes have used together so far.

    Raises OSError if one of them does not exist, or if the system has no /proc.
    """
    ticks = 0
    for pid in pids:
        # The name of the program, in brackets, may hold anything; what follows it is numbers.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user, system = after_name[11:13]
        ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")
