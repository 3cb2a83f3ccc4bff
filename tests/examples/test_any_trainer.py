"""Trainers of 60 lines, in Python and TypeScript, and a worker, against what `turnout up --reference` starts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.helpers import running, stop, turnout
from tests.clients_langs.toolchains import TYPESCRIPT, build

EXAMPLES = Path(__file__).parents[2] / "examples"
DEFAULTS = {"buffer": "127.0.0.1:50051", "engine": "127.0.0.1:50052", "scheduler": "127.0.0.1:50053"}
FREE = ("--buffer", "127.0.0.1:0", "--engine", "127.0.0.1:0", "--scheduler", "127.0.0.1:0")


def moved(text: str, targets: dict[str, str]) -> str:
    """Return the text of an example with the addresses of this test."""
    for service, default in DEFAULTS.items():
        text = text.replace(default, targets[service])
    return text


def placed(name: str, targets: dict[str, str], directory: Path) -> list[str]:
    """Return the command of an example that finds the services of this test."""
    path = directory / name
    path.write_text(moved((EXAMPLES / name).read_text(), targets))
    return [sys.executable, str(path)]


@contextmanager
def world(directory: Path) -> Iterator[dict[str, str]]:
    """Run what the examples want beside them, a worker included; yields where the services are."""
    with running("up", "--run", "my-run", "--reference", "1:1", "--log-level", "error", *FREE) as process:
        assert process.stdout is not None
        targets: dict[str, str] = {}
        while len(targets) < 4:
            match = re.fullmatch(r"turnout (\w+) listening on (\S+)", process.stdout.readline().strip())
            assert match is not None
            targets[match[1]] = match[2]
        assert process.stdout.readline() == "turnout run my-run: hybrid-0, standalone-0\n"
        worker = subprocess.Popen(placed("any_worker.py", targets, directory))
        try:
            yield targets
        finally:
            worker.terminate()
            worker.wait(30)
            stop(process)


def trains(command: list[str], targets: dict[str, str]) -> None:
    """Run a trainer to its last step, and see that it lent its GPUs."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("step 5 mini-batch 3: reward 0.")
    status = turnout("status", *[text for name in DEFAULTS for text in (f"--{name}", targets[name])])
    assert re.search(r"my-run +closed +\w+ +5 +0 +0 +[1-9]", status.stdout), status.stdout


@pytest.mark.parametrize("path", [EXAMPLES / "any_trainer.py", TYPESCRIPT / "example" / "any_trainer.ts"])
def test_the_trainer_has_at_most_sixty_lines(path: Path) -> None:
    """The whole point of it: what a team has to add to a loop of its own can be read at one look."""
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it needs PyTorch: make test-stores has it")
def test_it_trains_and_lends_until_its_last_step(tmp_path: Path) -> None:
    """The first thing that a newcomer copies must run as it stands."""
    with world(tmp_path) as targets:
        trains(placed("any_trainer.py", targets, tmp_path), targets)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_its_sister_in_typescript_does_too(tmp_path: Path) -> None:
    """The hooks of the client in TypeScript, with nothing around them."""
    build("typescript")
    source = TYPESCRIPT / "dist" / "example" / "any_trainer.js"
    with world(tmp_path) as targets:
        # Beside the original, whose imports are relative.
        program = source.with_name(f"any_trainer-{os.getpid()}.js")
        program.write_text(moved(source.read_text(), targets))
        try:
            trains(["node", str(program)], targets)
        finally:
            program.unlink()
