"""The distributions of this repository, built, and clean environments with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = {"turnout": ROOT / "clients" / "python", "turnout_services": ROOT}
INSTALL_S: Final = 900


@dataclass(frozen=True)
class Built:
    """Files of one distribution."""

    wheel: Path
    sdist: Path


def run(command: Sequence[str | Path], timeout: float = INSTALL_S, **options: Any) -> str:
    """Run a command to its end and return what it printed; fails with that unless it ended well."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


def build(name: str, directory: Path) -> Built:
    """Build sdist and wheel, the wheel from the sdist, as `python -m build` does."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, SOURCES[name]])
    (wheel,) = directory.glob(f"{name}-*.whl")
    (sdist,) = directory.glob(f"{name}-*.tar.gz")
    return Built(wheel, sdist)


def lowest(name: str) -> list[str]:
    """Return the lower bounds that a distribution declares, as pins."""
    project = tomllib.loads((SOURCES[name] / "pyproject.toml").read_text())["project"]
    found = [re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)", text) for text in project["dependencies"]]
    return [f"{match[1]}=={match[2]}" for match in found if match]


class Environment:
    """A virtual environment of its own, away from the repository."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=True)
        self._bin = directory / "bin"
        self._directory = directory

    def install(self, *what: str | Path, pins: Sequence[str] = ()) -> None:
        """Install with these versions and no others."""
        constraints = self._directory / "constraints.txt"
        constraints.write_text("\n".join(pins))
        quiet = ("--quiet", "--disable-pip-version-check")
        run([self._bin / "python", "-m", "pip", "install", *quiet, "-c", constraints, *what])
        run([self._bin / "python", "-m", "pip", "check", "--disable-pip-version-check"])

    def resolve(self, *what: str | Path) -> set[str]:
        """Return the names of all that would be installed; nothing is, and of most only the metadata is read."""
        report = self._directory / "report.json"
        asked = ("install", "--quiet", "--disable-pip-version-check", "--dry-run", "--ignore-installed")
        run([self._bin / "python", "-m", "pip", *asked, "--report", report, *what])
        return {one["metadata"]["name"].lower() for one in json.loads(report.read_text())["install"]}

    def run(self, command: str, *arguments: str, timeout: float = 300, cwd: Path | None = None) -> str:
        """Run a command of the environment, in an empty place unless `cwd` is given."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return run([self._bin / command, *arguments], timeout, cwd=cwd or self._directory, env=environment)
