"""What freed memory becomes."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import threading, time
from pathlib import Path
from services.runtime.allocator import keep_freed_memory, returning_holes

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

keep_freed_memory()
blocks = [bytes(16 << 10) for _ in range(8000)]
full = resident()
keep = blocks[::40]
del blocks
holes = resident()
with returning_holes(0.05):
    while resident() > full // 2:
        time.sleep(0.05)
print(full, holes, resident(), len(keep), threading.active_count())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it needs glibc")
def test_pages_in_which_nothing_lives_go_back_to_the_kernel() -> None:
    """What lives on between them keeps the heap from shrinking; a service would keep the memory of its worst minute."""
    place = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=50, cwd=place, check=True
    )
    full, holes, left, kept, threads = map(int, run.stdout.split())
    assert holes > 0.8 * full
    assert left <= full // 2
    assert (kept, threads) == (200, 1)
