"""Directories for journals."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory whose syncs cost nothing, for tests that open hundreds of journals."""
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared_memory, prefix="turnout-test-") as directory:
        yield Path(directory)
