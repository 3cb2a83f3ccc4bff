"""What each language needs on this machine, and how its programs are built; `make test-clients` installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
GO: Final = ROOT / "clients" / "go"
TYPESCRIPT: Final = ROOT / "clients" / "typescript"
CPP: Final = ROOT / "clients" / "cpp"
GO_PACKAGES: Final = Path("/usr/share/gocode")
"""Where Debian keeps the sources of Go packages."""

BUILD_S: Final = 240
CPP_BUILD_S: Final = 900
"""The stubs in C++ take a minute of processor time."""


@dataclass(frozen=True)
class Built:
    """Commands of one language."""

    loop: tuple[str, ...]
    """The trainer and worker program."""
    tests: tuple[str, ...]
    """Its own tests; those against a live buffer run where TURNOUT_TEST_BUFFER names one."""
    cwd: Path
    environment: dict[str, str]


def need(language: str) -> None:
    """Skip unless the toolchain of a language is here."""
    if language == "go":
        missing = [name for name in ("go",) if shutil.which(name) is None]
        if not (GO_PACKAGES / "src/google.golang.org/grpc").is_dir():
            missing.append("golang-google-grpc-dev")
    elif language == "cpp":
        missing = [name for name in ("cmake", "protoc", "grpc_cpp_plugin", "pkg-config") if shutil.which(name) is None]
    else:
        missing = [name for name in ("node",) if shutil.which(name) is None]
        if not (TYPESCRIPT / "node_modules/.bin/tsc").exists():
            missing.append("clients/typescript/node_modules")
    if missing:
        pytest.skip(f"{language}: {', '.join(missing)} not there; make test-clients installs it")


def go_environment() -> dict[str, str]:
    """Return an environment in which Go finds this repository and Debian's packages, and asks no network."""
    path = Path(tempfile.gettempdir()) / f"turnout-gopath-{os.getuid()}-{ROOT.name}"
    link = path / "src/github.com/turnout-rl/turnout"
    if not link.is_symlink() or link.resolve() != ROOT:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT)
    return {"GO111MODULE": "off", "GOFLAGS": "", "GOPATH": f"{path}:{GO_PACKAGES}"}


@cache
def build(language: str) -> Built:
    """Build the programs of a language, once per test run."""
    need(language)
    if language == "go":
        environment = go_environment()
        package = Path(environment["GOPATH"].split(":")[0]) / "src/github.com/turnout-rl/turnout/clients/go"
        run(["go", "build", "-o", "bin/loop", "./cmd/loop"], package, environment)
        return Built((str(GO / "bin/loop"),), ("go", "test", "-count=1", "./..."), package, environment)
    run(["node_modules/.bin/tsc", "-p", "."], TYPESCRIPT, {})
    tests = sorted(str(path) for path in (TYPESCRIPT / "dist/test").glob("*.test.js"))
    return Built(("node", "dist/example/main.js"), ("node", "--test", "--test-timeout=60000", *tests), TYPESCRIPT, {})


@cache
def build_smoke() -> Path:
    """Build the stubs and the smoke program in C++, and return the program."""
    need("cpp")
    from google.rpc import error_details_pb2

    googleapis = Path(error_details_pb2.__file__).parents[2]
    out = CPP / "build"
    run(["cmake", "-S", str(CPP), "-B", str(out), f"-DGOOGLEAPIS={googleapis}"], ROOT, {})
    run(["cmake", "--build", str(out)], ROOT, {}, timeout=CPP_BUILD_S)
    return out / "smoke"


def run(command: Sequence[str], cwd: Path, environment: dict[str, str], timeout: float = BUILD_S) -> str:
    """Run a command to its end; fails with its output unless it ended well."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PWD": str(cwd), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}"
    return done.stdout
