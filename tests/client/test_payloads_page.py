"""The examples of docs/payloads.md."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "payloads.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied from the page works, and holds what it says."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exec(compile(code, str(PAGE), "exec"), {})


def test_there_are_examples() -> None:
    """The test above passes for a page without any."""
    assert len(EXAMPLES) == 4
