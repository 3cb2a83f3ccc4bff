"""Generates the stubs of the clients in Go and TypeScript, or checks that the committed ones are what the protos give.

Invariants: the compiler is the one of the Python stubs (tools/protos.py), so its version is the same everywhere; the
plugins are Debian's for Go and those of clients/typescript/package.json for TypeScript; only the contract is generated,
not what services store.

    python3 -m tools.languages [go] [typescript]            write the stubs
    python3 -m tools.languages --check [go] [typescript]    exit 1 and name what differs; 3: no plugin
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tools.protos import EXIT_DRIFT, EXIT_NO_GENERATOR, ROOT, GeneratorUnavailable, ensure_generator

PROTOS: Final = ROOT / "protos"
MODULE: Final = "github.com/turnout-rl/turnout/clients/go/gen"
TYPESCRIPT: Final = ROOT / "clients" / "typescript"
TS_PLUGIN: Final = TYPESCRIPT / "node_modules" / ".bin" / "protoc-gen-ts_proto"

TS_OPTIONS: Final = (
    "env=node",
    "esModuleInterop=true",
    "importSuffix=.js",
    "forceLong=bigint",  # a Number loses what is above 2**53
    "oneof=unions-value",
    "useOptionals=none",
    "unrecognizedEnum=true",  # a newer service's values are kept, as numbers
    "useDate=false",
    "outputServices=grpc-js",
    "removeEnumPrefix=false",
    "exportCommonSymbols=false",
)


def contract() -> list[str]:
    """Return the protos that other languages get, relative to the root of the protos."""
    return sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto") if "storage" not in path.parts)


def out_of(language: str) -> Path:
    """Return where the committed stubs of a language lie."""
    return ROOT / "clients" / language / "gen"


def generate(language: str, out: Path) -> None:
    """Generate the stubs of one language into `out`. Raises GeneratorUnavailable."""
    binaries = ensure_generator(ROOT / ".venv-protos")
    common = next((binaries.parent / "lib").glob("python*/site-packages"))
    sources = contract()
    if language == "go":
        if missing := [name for name in ("protoc-gen-go", "protoc-gen-go-grpc") if shutil.which(name) is None]:
            raise GeneratorUnavailable(f"{' and '.join(missing)} not found; Debian packages of these names have them")
        flags = [
            f"--go_out={out}",
            f"--go_opt=module={MODULE}",
            f"--go-grpc_out={out}",
            f"--go-grpc_opt=module={MODULE}",
        ]
    else:
        if not TS_PLUGIN.exists():
            raise GeneratorUnavailable("run npm install in clients/typescript first")
        # The types of error details come from googleapis; in Go they are a package of their own.
        sources += ["google/rpc/status.proto", "google/rpc/error_details.proto"]
        flags = [
            f"--plugin=protoc-gen-ts_proto={TS_PLUGIN}",
            f"--ts_proto_out={out}",
            f"--ts_proto_opt={','.join(TS_OPTIONS)}",
        ]
    out.mkdir(parents=True, exist_ok=True)
    command = [
        str(binaries / "python"),
        "-W",
        "ignore",
        "-m",
        "grpc_tools.protoc",
        "-I",
        str(PROTOS),
        "-I",
        str(common),
    ]
    subprocess.run([*command, *flags, *sources], check=True, cwd=PROTOS, env=os.environ)


def drift(fresh: Path, there: Path) -> list[str]:
    """Return one line for each file that is missing, left over or different."""
    wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    found = {path.relative_to(there) for path in there.rglob("*") if path.is_file()}
    lines = [f"left over: {path}" for path in sorted(found - wanted)]
    lines += [f"missing: {path}" for path in sorted(wanted - found)]
    same = sorted(wanted & found)
    return lines + [f"differs: {path}" for path in same if (fresh / path).read_bytes() != (there / path).read_bytes()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate the stubs of Go and TypeScript from the protos.")
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs and write nothing")
    parser.add_argument("languages", nargs="*", help="go, typescript; both unless named")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.languages) - {"go", "typescript"}):
        parser.error(f"no such language: {', '.join(unknown)}")
    status = 0
    for language in options.languages or ("go", "typescript"):
        with tempfile.TemporaryDirectory(prefix="turnout-stubs-") as scratch:
            fresh, there = Path(scratch), out_of(language)
            try:
                generate(language, fresh)
            except GeneratorUnavailable as error:
                print(f"{language}: the generator is not there: {error}", file=sys.stderr)
                return EXIT_NO_GENERATOR
            if options.check:
                lines = drift(fresh, there)
                print("\n".join(f"{language}: {line}" for line in lines) or f"{language}: the stubs are current")
                status = EXIT_DRIFT if lines else status
            else:
                shutil.rmtree(there, ignore_errors=True)
                shutil.copytree(fresh, there)
                print(f"{language}: written to {there.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
