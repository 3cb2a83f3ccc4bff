"""examples/: a trainer in plain PyTorch and a worker, against what `turnout up --reference` starts."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import running, stop, turnout

EXAMPLES = Path(__file__).parents[2] / "examples"
DEFAULTS = {"buffer": "127.0.0.1:50051", "engine": "127.0.0.1:50052", "scheduler": "127.0.0.1:50053"}
FREE = ("--buffer", "127.0.0.1:0", "--engine", "127.0.0.1:0", "--scheduler", "127.0.0.1:0")


def placed(name: str, targets: dict[str, str], directory: Path) -> list[str]:
    """Return the command of an example whose addresses are replaced by those of this test."""
    text = (EXAMPLES / name).read_text()
    for service, default in DEFAULTS.items():
        text = text.replace(default, targets[service])
    path = directory / name
    path.write_text(text)
    return [sys.executable, str(path)]


def test_the_trainer_has_at_most_sixty_lines() -> None:
    """The whole point of it: what a team has to add to a loop of its own can be read at one look."""
    assert len((EXAMPLES / "any_trainer.py").read_text().splitlines()) <= 60


@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it needs PyTorch: make test-stores has it")
def test_it_trains_and_lends_until_its_last_step(tmp_path: Path) -> None:
    """The first thing that a newcomer copies must run as it stands."""
    with running("up", "--run", "my-run", "--reference", "1:1", "--log-level", "error", *FREE) as process:
        assert process.stdout is not None
        targets: dict[str, str] = {}
        while len(targets) < 4:
            match = re.fullmatch(r"turnout (\w+) listening on (\S+)", process.stdout.readline().strip())
            assert match is not None
            targets[match[1]] = match[2]
        assert process.stdout.readline() == "turnout run my-run: hybrid-0, standalone-0\n"
        worker = subprocess.Popen(placed("any_worker.py", targets, tmp_path))
        try:
            done = subprocess.run(
                placed("any_trainer.py", targets, tmp_path), capture_output=True, text=True, timeout=300, check=False
            )
        finally:
            worker.terminate()
            worker.wait(30)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("step 5 mini-batch 3: reward 0.")
        where = [text for name in DEFAULTS for text in (f"--{name}", targets[name])]
        status = turnout("status", *where)
        assert re.search(r"my-run +closed +\w+ +5 +0 +0 +[1-9]", status.stdout), status.stdout
        stop(process)
