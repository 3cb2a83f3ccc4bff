"""How the memory of processes goes over time.

Invariants: memory is the resident set as the kernel counts it, of each process alone; a slope comes with its 95 %
margin, made from means of blocks, since neighbouring readings tell the same thing and would make any slope look sure.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

MIB: Final = 1 << 20
BLOCKS: Final = 20
"""Parts of the measured time: enough for a margin, each long enough to be nearly independent of the next."""

_T: Final = 2.10
"""97.5 % quantile of Student's distribution with BLOCKS - 2 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per minute, and how far off it may be."""

    per_minute: float
    margin: float
    """Half of the 95 % confidence interval."""


def resident_bytes(pid: int) -> int:
    """Return the resident set of a process. Raises OSError if it does not exist, or if the system has no /proc."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def slope(readings: Sequence[tuple[float, float]]) -> Slope:
    """Return the slope of (seconds, value) by least squares over means of blocks. Raises ValueError if they are few."""
    if len(readings) < BLOCKS:
        raise ValueError(f"{len(readings)} readings are too few for a slope: there have to be {BLOCKS}")
    size = len(readings) / BLOCKS
    blocks = [readings[round(n * size) : round((n + 1) * size)] for n in range(BLOCKS)]
    times = [fmean(at for at, _ in block) / 60 for block in blocks]
    values = [fmean(value for _, value in block) for block in blocks]
    middle, mean = fmean(times), fmean(values)
    spread = sum((at - middle) ** 2 for at in times)
    found = sum((at - middle) * (value - mean) for at, value in zip(times, values, strict=True)) / spread
    left = sum((value - mean - found * (at - middle)) ** 2 for at, value in zip(times, values, strict=True))
    return Slope(found, _T * math.sqrt(left / (BLOCKS - 2) / spread))


class MemoryWatch:
    """Reads the memory of named processes every `period` seconds, until cancelled."""

    def __init__(self, pids: Mapping[str, Sequence[int]], period: float) -> None:
        """`pids`: of processes that do the same the mean is taken."""
        self._pids = pids
        self._period = period
        self.readings: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
        """Seconds since the start, MiB."""

    async def run(self) -> None:
        """Read until cancelled."""
        began = time.monotonic()
        number = 0
        while True:
            at = time.monotonic() - began
            for name, pids in self._pids.items():
                self.readings[name].append((at, fmean(map(resident_bytes, pids)) / MIB))
            number += 1
            await asyncio.sleep(max(0.0, began + number * self._period - time.monotonic()))

    def slope(self, name: str, after: float) -> Slope:
        """How the memory of these processes grew from `after` seconds on, in MiB per minute."""
        return slope([reading for reading in self.readings[name] if reading[0] >= after])
