"""Space held in reserve for the time when the disk is full.

Invariants: given back at most once until it is taken again; it is taken only while the disk keeps as much free beside
it, so that taking it never fills the disk; every method may be called from any thread.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


class Ballast:
    """A file of `size` bytes whose only use is to be deleted; size 0 = none."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._lock = threading.Lock()
        self._held = False

    @property
    def held(self) -> bool:
        """Whether the space is in reserve."""
        return self._held

    @property
    def given_back(self) -> bool:
        """Whether there should be a reserve and is none: the disk is, or was a moment ago, full."""
        return self._size > 0 and not self._held

    def take(self) -> bool:
        """Reserve the space if the disk has room for twice as much; return whether it is held."""
        with self._lock:
            if self._held or self._size == 0:
                return self._held
            disk = os.statvfs(self._path.parent)
            if disk.f_bavail * disk.f_frsize < 2 * self._size:
                return False
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _allocate(descriptor, self._size)
                self._held = True
            except OSError:
                self._path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
            return self._held

    def drop(self) -> None:
        """Remove the file of an earlier process, so that opening has the space; `take` follows."""
        with self._lock:
            self._path.unlink(missing_ok=True)
            self._held = False

    def give_back(self) -> bool:
        """Free the space; return whether there was any to free."""
        with self._lock:
            if not self._held:
                return False
            self._path.unlink(missing_ok=True)
            self._held = False
            return True


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    block = bytes(1 << 16)
    while size > 0:
        size -= os.write(descriptor, block[:size])
