"""The committed stubs are what the protos give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_GENERATOR = 3


@pytest.mark.timeout(300)
def test_committed_stubs_are_those_of_the_protos() -> None:
    """A proto changed without `make protos` would show other fields to Python than to every other language."""
    check = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "protos.py"), "--check"], capture_output=True, text=True, check=False
    )
    if check.returncode == NO_GENERATOR:
        pytest.skip(f"the generator cannot be installed here: {check.stderr.strip()[-200:]}")
    assert check.returncode == 0, check.stdout + check.stderr
