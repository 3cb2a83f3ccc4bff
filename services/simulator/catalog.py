"""The workloads that come with the simulator, and those of a user's file.

Invariant: a name stands for one file of this package; whatever is wrong with a file becomes one WorkloadError that
names the file and every field that is wrong.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import yaml
from pydantic import ValidationError

from services.simulator.workload import Workload


class WorkloadError(ValueError):
    """A workload cannot be used. `source` is its name or file, `problems` one line per field."""

    def __init__(self, source: str, problems: tuple[str, ...]) -> None:
        super().__init__(source, problems)
        self.source = source
        self.problems = problems

    def __str__(self) -> str:
        return f"{self.source}: {'; '.join(self.problems)}"


def names() -> tuple[str, ...]:
    """The built-in workloads, `calibrated` first, the others by name."""
    files = resources.files("services.simulator").joinpath("workloads").iterdir()
    found = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    return tuple(sorted(found, key=lambda name: name != "calibrated"))


def load(name_or_file: str) -> Workload:
    """The built-in workload of that name, or else the one in that file. Raises WorkloadError."""
    if name_or_file in names():
        text = resources.files("services.simulator").joinpath("workloads", f"{name_or_file}.yaml").read_text("utf-8")
        return parse(text, name_or_file)
    path = Path(name_or_file)
    if not path.suffix and not path.exists():
        raise WorkloadError(name_or_file, (f"is neither a file nor one of {', '.join(names())}",))
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(name_or_file, (f"cannot be read: {error}",)) from error
    return parse(text, name_or_file)


def parse(text: str, source: str) -> Workload:
    """The workload in a YAML text that came from `source`. Raises WorkloadError."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise WorkloadError(source, (f"is not YAML: {' '.join(str(error).split())}",)) from error
    if not isinstance(content, dict):
        raise WorkloadError(source, ("is not a mapping of fields",))
    try:
        return Workload.model_validate(content)
    except ValidationError as error:
        problems = (
            f"{'.'.join(str(part) for part in problem['loc']) or 'the workload'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise WorkloadError(source, tuple(problems)) from error
