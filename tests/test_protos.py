"""The committed stubs are what the protos give."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_GENERATOR = 3
BUF = ROOT / "node_modules" / ".bin" / "buf"
BREAKS = {
    "buffer/v1/buffer.proto": (r"  int32 group_size = 6;", "  int32 group_size = 60;"),
    "engine/v1/engine.proto": (r"  rpc Reclaim\(", "  rpc TakeBack("),
    "scheduler/v1/scheduler.proto": (r"  int64 (\w+) = (\d+);", r"  string \1 = \2;"),
    "buffer/storage/v1/storage.proto": (r"  string (\w+) = 1;", r"  bytes \1 = 1;"),
}
"""What a careless change does to each: a pattern, and what takes its first place."""


@pytest.mark.timeout(300)
def test_committed_stubs_are_those_of_the_protos() -> None:
    """A proto changed without `make protos` would show other fields to Python than to every other language."""
    check = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "protos.py"), "--check"], capture_output=True, text=True, check=False
    )
    if check.returncode == NO_GENERATOR:
        pytest.skip(f"the generator cannot be installed here: {check.stderr.strip()[-200:]}")
    assert check.returncode == 0, check.stdout + check.stderr


def _broken(protos: Path) -> subprocess.CompletedProcess[str]:
    (released,) = (ROOT / "protos" / "released").glob("*.txtpb")
    command = [str(BUF), "breaking", str(protos), "--against", str(released)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_released_contract_is_that_of_one_version_not_above_ours() -> None:
    """Compared with a contract that nobody has, every break passes."""
    (released,) = (ROOT / "protos" / "released").glob("*.txtpb")
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert [int(part) for part in released.stem.split(".")] <= [int(part) for part in ours.split(".")]
    assert set(re.findall(r'name: "turnout/(.+)"', released.read_text())) >= set(BREAKS)


@pytest.mark.skipif(not BUF.exists(), reason="it needs buf: make protos-lint installs it")
def test_the_protos_break_nothing_that_was_released() -> None:
    """A client that was built last month would misread what this month's service sends."""
    done = _broken(ROOT / "protos")
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not BUF.exists(), reason="it needs buf: make protos-lint installs it")
@pytest.mark.parametrize("path", BREAKS)
def test_a_breaking_change_is_refused(path: str, tmp_path: Path) -> None:
    """A check that compares with nothing passes everything, and did before there was a release."""
    protos = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", protos, ignore=shutil.ignore_patterns("released"))
    changed = protos / "turnout" / path
    text, count = re.subn(*BREAKS[path], changed.read_text(), count=1)
    assert count == 1
    changed.write_text(text)
    done = _broken(protos)
    assert done.returncode != 0
    assert path in done.stdout
