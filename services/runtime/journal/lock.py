"""The lock that keeps a journal to one process.

Invariants: held from before the first file is read until after the last is closed; the kernel drops it with the
process, however that ends, so no stale lock is ever left.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from services.runtime.errors import failed_precondition


class DirectoryLock:
    """An exclusive flock on a file."""

    def __init__(self, path: Path) -> None:
        """Take the lock, making the directory if need be.

        Raises FAILED_PRECONDITION / JOURNAL_LOCKED naming the process that has it, or OSError.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            message = f"the journal in {path.parent} is open in another service (process {holder})"
            raise failed_precondition("JOURNAL_LOCKED", message, directory=path.parent, holder=holder) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)
