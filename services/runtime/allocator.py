"""The C library's allocator, told what kind of process this is.

Why: messages of a megabyte come and go by the hundred. By default glibc gives such memory back to the kernel each time
and takes fresh pages for the next one, whose first touch costs more than the copying of a megabyte.
"""

import ctypes
from typing import Final

# Names and numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

KEPT_BYTES: Final = 32 << 20
"""Freed memory that is kept for what comes next, and the size above which memory is taken from the kernel piece by
piece (the most glibc allows): some messages of every stream that is at work, and little beside what a service holds."""


def keep_freed_memory() -> None:
    """Let this process use freed memory again instead of giving it back at once; does nothing without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
