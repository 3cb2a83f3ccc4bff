"""A small disk for the buffer: a tmpfs where we may mount one, and then it can be filled and emptied.

Invariants: leaving it unmounts it; filling leaves no byte free for anybody, until `restore`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.soak.content import MIB

_BLOCK: Final = bytes(4 * MIB)


class Disk:
    """The disk below `directory`; `small` tells whether it is one of its own."""

    def __init__(self, directory: Path, *, small: bool) -> None:
        self.directory = directory
        self.small = small
        self._filler = directory / "filler"

    @property
    def full(self) -> bool:
        """Whether it is filled at present."""
        return self._filler.exists()

    def fill(self) -> None:
        """Take all free space."""
        file = os.open(self._filler, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            # Ever smaller pieces: the last page counts.
            for size in (4 * MIB, 64 * 1024, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        _write(file, size)
        finally:
            os.close(file)

    def restore(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)


def _write(file: int, size: int) -> None:
    if os.write(file, _BLOCK[:size]) < size:
        raise OSError(errno.ENOSPC, "full")


@contextmanager
def small_disk(directory: Path, size: int) -> Iterator[Disk]:
    """Mount a disk of `size` bytes at `directory`, which is made; without the right to do so it is an ordinary one."""
    directory.mkdir(parents=True)
    mounted = _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(directory))
    try:
        yield Disk(directory, small=mounted)
    finally:
        if mounted and not _run("umount", str(directory)):
            # Somebody is in there still; it goes when they do.
            _run("umount", "-l", str(directory))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
