"""The Python packages: versions that fit together, and whether the right `services` is imported.

Invariant: what is installed and where is given, so that every case can be looked at anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Final

from services.doctor.finding import Finding, ok, problem, warning

FLOORS: Final = {"grpcio": (1, 71, 2), "protobuf": (5, 29, 6)}
"""The oldest that the stubs work with: they say so themselves at import, with a traceback."""

HELPERS: Final = ("grpcio-health-checking", "grpcio-reflection", "grpcio-channelz", "grpcio-status")
"""They are released together with grpcio and import what is new in it."""

OWN: Final = ("turnout-services", "turnout")

REINSTALL: Final = "make an environment of its own for Turnout and install it there: pip install turnout-services"


def installed() -> dict[str, str]:
    """Versions of the packages that matter; those that are not there are left out."""
    found = {}
    for name in (*OWN, *FLOORS, *HELPERS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_versions(found: Mapping[str, str]) -> Iterator[Finding]:
    """Whether these versions work together."""
    for name, floor in FLOORS.items():
        version = found.get(name)
        if version is None:
            yield problem("versions", name, "not installed", REINSTALL)
        elif _numbers(version) < floor:
            wanted = ".".join(map(str, floor))
            yield problem("versions", name, f"{version} is older than {wanted}", f"pip install '{name}>={wanted}'")
        else:
            yield ok("versions", name, version)
    grpc = found.get("grpcio", "0")
    for name in HELPERS:
        version = found.get(name)
        if version is None:
            yield problem("versions", name, "not installed", f"pip install '{name}=={grpc}'")
        elif _numbers(version) > _numbers(grpc):
            text = f"{version} is newer than grpcio {grpc}"
            yield problem("versions", name, text, f"pip install '{name}=={grpc}', or a newer grpcio")
    versions = {name: found.get(name, "not installed") for name in OWN}
    if len(set(versions.values())) > 1:
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        advice = f"pip install turnout=={versions['turnout-services']}: services and client are released together"
        yield problem("versions", "turnout", text, advice)
    else:
        yield ok("versions", "turnout", versions["turnout"])


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without what follows its numbers: 1.72.0rc1 counts as 1.72.0."""
    return tuple(int("".join(takewhile(str.isdigit, part)) or 0) for part in version.split(".")[:3])


def check_shadowing(own: Path, python_path: str, folder: Path) -> Iterator[Finding]:
    """Whether another package of the name `services` gets in the way.

    `own`: the folder of the package that is running. `python_path`: the variable PYTHONPATH. `folder`: the current
    directory, which `python -m` puts before everything.
    """
    entries = [Path(entry) for entry in python_path.split(os.pathsep) if entry]
    found = list(_others(own, entries))
    for place in found:
        yield problem(
            "shadowing",
            "services",
            f"PYTHONPATH finds {place} before Turnout's own package",
            f"unset PYTHONPATH for Turnout, or start it with python -I: env -u PYTHONPATH turnout ... ({place.parent})",
        )
    for place in _others(own, [folder]):
        yield warning(
            "shadowing",
            "services",
            f"{place} would be imported by python -m from here",
            "start the services with the command turnout, or with python -P -m services.cli.main",
        )
        return
    if not found:
        yield ok("shadowing", "services", str(own))


def _others(own: Path, entries: Iterable[Path]) -> Iterator[Path]:
    for entry in entries:
        for place in (entry / "services" / "__init__.py", entry / "services.py"):
            if place.is_file() and place.resolve() != (own / "__init__.py").resolve():
                yield place
