"""Generates the Python stubs from the protos, or checks that the committed ones are what the protos give.

Invariants: the generator lives in a virtual environment of its own, so its pins never meet those of the services; the
same protos give the same bytes on every machine; `--check` writes nothing into the checkout but that environment.

    python tools/protos.py            write the stubs
    python tools/protos.py --check    exit 1 and name the files that differ
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tools" / "protos-requirements.txt"
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")

EXIT_DRIFT = 1
EXIT_NO_GENERATOR = 3
"""The generator's environment could not be made (no network, say): nothing is known about drift."""


class GeneratorUnavailable(Exception):
    """The generator's environment could not be made."""


def ensure_generator(directory: Path) -> Path:
    """Make or reuse the generator's environment and return its bin directory.

    A copy of the requirements inside it tells whether it is complete and current.
    """
    stamp = directory / "requirements.txt"
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    binaries = directory / "bin"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return binaries
    try:
        venv.create(directory, clear=True, with_pip=True)
        subprocess.run(
            [str(binaries / "python"), "-m", "pip", "install", "--quiet", "--requirement", str(REQUIREMENTS)],
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise GeneratorUnavailable(str(error)) from error
    stamp.write_text(wanted, encoding="utf-8")
    return binaries


def generate(protos: Path, out: Path, binaries: Path) -> list[Path]:
    """Generate the stubs of every proto below `protos` into `out`; return the files written, relative to `out`."""
    sources = sorted(
        str(path.relative_to(protos)) for path in protos.rglob("*.proto") if "node_modules" not in path.parts
    )
    if not sources:
        raise SystemExit(f"no .proto file below {protos}")
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"}
    outputs = [f"--{plugin}_out={out}" for plugin in ("python", "grpc_python")]
    outputs += [f"--{plugin}_out=quiet:{out}" for plugin in ("mypy", "mypy_grpc")]
    # pkg_resources announces its own retirement on every start.
    command = [
        str(binaries / "python"),
        "-W",
        "ignore",
        "-m",
        "grpc_tools.protoc",
        "-I",
        str(protos),
        *outputs,
        *sources,
    ]
    subprocess.run(command, check=True, cwd=protos, env=environment)
    for source in sources:
        for package in list(Path(source).parents)[:-2]:
            dotted = ".".join(package.parts)
            (out / package / "__init__.py").write_text(f'"""Generated code of {dotted}."""\n', encoding="utf-8")
    return sorted(path.relative_to(out) for path in out.rglob("*.py*") if path.suffix in {".py", ".pyi"})


def committed(package_root: Path) -> list[Path]:
    """Return the generated files now in the checkout, relative to `package_root`."""
    return sorted(
        path.relative_to(package_root) for path in package_root.rglob("*") if path.name.endswith(GENERATED_SUFFIXES)
    )


def drift(fresh: Path, package_root: Path) -> list[str]:
    """Return one line for each file that is missing, left over or different."""
    wanted = {path.relative_to(fresh) for path in fresh.rglob("*.py*") if path.suffix in {".py", ".pyi"}}
    lines = [f"left over: {path}" for path in committed(package_root) if path not in wanted]
    for path in sorted(wanted):
        there = package_root / path
        if not there.is_file():
            lines.append(f"missing: {path}")
        elif there.read_bytes() != (fresh / path).read_bytes():
            lines.append(f"differs: {path}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate the Python stubs from the protos.")
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs and write nothing")
    parser.add_argument("--protos", type=Path, default=ROOT / "protos", help="the root of the protos")
    parser.add_argument("--out", type=Path, default=ROOT / "clients" / "python", help="where the package turnout lies")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-protos", help="the generator's environment")
    options = parser.parse_args(argv)
    try:
        binaries = ensure_generator(options.venv)
    except GeneratorUnavailable as error:
        print(f"the stub generator cannot be installed: {error}", file=sys.stderr)
        return EXIT_NO_GENERATOR
    with tempfile.TemporaryDirectory(prefix="turnout-protos-") as scratch:
        fresh = Path(scratch)
        written = generate(options.protos.resolve(), fresh, binaries)
        if options.check:
            lines = drift(fresh, options.out)
            print("\n".join(lines) if lines else f"{len(written)} files are current")
            return EXIT_DRIFT if lines else 0
        for path in committed(options.out):
            if path not in written:
                (options.out / path).unlink()
        for path in written:
            target = options.out / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((fresh / path).read_bytes())
        print(f"{len(written)} files written below {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
