"""A book: what one process was told, kept where kill -9 cannot take it back.

Invariants: an entry is on disk before `write` returns; an entry is a line, and a line that a kill cut short is no
entry; `at` is the monotonic clock of the machine, the same for all processes on it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
"""`kind` and `at` (seconds), and what else there is to say."""


class Book:
    """An append-only file of entries, written by one process at a time."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        whole = path.read_bytes()
        os.ftruncate(self._file, whole.rfind(b"\n") + 1)

    def write(self, kind: str, **facts: Any) -> None:
        """Add an entry."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), **facts}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")
        os.fdatasync(self._file)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def read(path: Path) -> list[Entry]:
    """Return the entries of a book, in the order in which they were written; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]
