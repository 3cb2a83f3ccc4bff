"""The pages of the other languages: their commands are executed, their snippets compiled."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients_langs.toolchains import CPP, GO, GO_PACKAGES, TYPESCRIPT, go_environment, need, run
from tests.clients_langs.world import Service, running
from tests.docs.blocks import Piece, pieces_of
from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow
LONGEST_S = 900

GO_AROUND = """package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	bufferv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/buffer/v1"
	"github.com/turnout-rl/turnout/clients/go/turnout"
)

const host = "me"

func newID() string {
	var bytes [8]byte
	rand.Read(bytes[:])
	return hex.EncodeToString(bytes[:])
}

func generate(claim *bufferv1.Claim) *bufferv1.Output { return &bufferv1.Output{} }

func work(ctx context.Context) error {
%s
return nil
}

func main() { log.Fatal(work(context.Background())) }
"""

TS_AROUND = """import { randomUUID } from "node:crypto";
import type { Output } from "@turnout-rl/client/gen/turnout/buffer/v1/buffer.js";

declare const host: string;
declare function generate(groupId: string): Promise<Output>;

%s
"""


def _pieces(path: Path, language: str) -> list[Piece]:
    return [piece for piece in pieces_of(path.parent.name, path.read_text()) if piece.language == language]


def _installed(command: str) -> None:
    """Ask apt-get whether it has the packages that a page names."""
    assert command.startswith("apt-get install ")
    if os.geteuid() == 0:
        run(command.replace("install", "install --simulate", 1).split(), ROOT, {})


@pytest.mark.timeout(600)
def test_the_page_of_go_works(tmp_path: Path) -> None:
    """Paths of GOPATH mode are easily wrong, and a snippet that does not compile teaches the wrong names."""
    need("go")
    packages, *commands = [piece.key for piece in _pieces(GO / "README.md", "sh")]
    _installed(packages)
    run(["bash", "-euc", "\n".join(commands)], ROOT, {"HOME": str(tmp_path), "GOFLAGS": ""})
    (snippet,) = _pieces(GO / "README.md", "go")
    worker = tmp_path / "own/src/worker"
    worker.mkdir(parents=True)
    (worker / "main.go").write_text(GO_AROUND % snippet.text)
    environment = go_environment()
    environment["GOPATH"] = f"{tmp_path / 'own'}:{environment['GOPATH']}"
    run(["go", "vet", "worker"], worker, environment)


@pytest.mark.timeout(300)
def test_go_mod_asks_for_what_the_sources_import() -> None:
    """Whoever has a module proxy needs each module that is imported, and a version of Go that the sources fit."""
    need("go")
    module = json.loads(run(["go", "mod", "edit", "-json"], GO, {"GO111MODULE": "on", "GOFLAGS": "-mod=mod"}))
    assert module["Module"]["Path"] == "github.com/turnout-rl/turnout/clients/go"
    package = Path(go_environment()["GOPATH"].split(":")[0]) / "src/github.com/turnout-rl/turnout/clients/go"
    listed = run(
        ["go", "list", "-f", '{{join .Imports "\\n"}}\n{{join .TestImports "\\n"}}', "./..."], package, go_environment()
    )
    outside = {line for line in listed.split() if "." in line.partition("/")[0]}
    outside = {line for line in outside if not line.startswith(module["Module"]["Path"])}
    required = {one["Path"] for one in module["Require"]}
    assert {path for path in outside if not any(path == one or path.startswith(f"{one}/") for one in required)} == set()
    assert {one for one in required if not any(path == one or path.startswith(f"{one}/") for path in outside)} == set()
    assert GO_PACKAGES.is_dir()


@pytest.mark.timeout(2000)
def test_the_page_of_typescript_works(tmp_path: Path) -> None:
    """As for Go."""
    need("typescript")
    build = _pieces(TYPESCRIPT / "README.md", "sh")[0]
    run(["bash", "-euc", build.key], TYPESCRIPT, {}, timeout=LONGEST_S)
    (snippet,) = _pieces(TYPESCRIPT / "README.md", "ts")
    page, config = TYPESCRIPT / f"page-{os.getpid()}.ts", TYPESCRIPT / f"tsconfig-{os.getpid()}.json"
    options = {"noEmit": True, "incremental": False, "tsBuildInfoFile": None}
    try:
        page.write_text(TS_AROUND % snippet.text)
        config.write_text(
            json.dumps({"extends": "./tsconfig.json", "compilerOptions": options, "include": [page.name]})
        )
        run(["node_modules/.bin/tsc", "-p", config.name], TYPESCRIPT, {}, timeout=LONGEST_S)
    finally:
        page.unlink(missing_ok=True)
        config.unlink(missing_ok=True)


@pytest.mark.timeout(1200)
async def test_the_page_of_cpp_works() -> None:
    """As for Go."""
    need("cpp")
    from google.rpc import error_details_pb2

    packages, configure, build, smoke = [piece.key for piece in _pieces(CPP / "README.md", "sh")]
    await asyncio.to_thread(_installed, packages)
    googleapis = str(Path(error_details_pb2.__file__).parents[2])
    for command in (configure.replace("DIR", googleapis), build):
        await asyncio.to_thread(run, ["bash", "-euc", command], ROOT, {}, LONGEST_S)
    service = Service("buffer")
    async with running(service):
        command = smoke.replace("127.0.0.1:50051", service.target)
        done = await asyncio.to_thread(subprocess.run, command.split(), cwd=ROOT, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
