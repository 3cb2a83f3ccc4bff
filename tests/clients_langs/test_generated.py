"""The committed stubs of other languages and docs/api.md are what the protos give; what is served says so itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients_langs.world import ROOT, Service, running
from tools.apidoc import NotUnderstood, page, read
from tools.protos import EXIT_NO_GENERATOR

BUF = ROOT / "node_modules/.bin/buf"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("language", ["go", "typescript"])
def test_committed_stubs_are_those_of_the_protos(language: str) -> None:
    """A proto changed without its stubs would show other fields to this language than to Python."""
    command = [sys.executable, "-m", "tools.languages", "--check", language]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == EXIT_NO_GENERATOR:
        pytest.skip(f"{done.stderr.strip().splitlines()[-1]}; make test-clients installs it")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_api_page_is_what_the_protos_give() -> None:
    assert (ROOT / "docs/api.md").read_text(encoding="utf-8") == page(ROOT / "protos"), "python3 -m tools.apidoc"


def test_the_api_page_names_every_call_and_field() -> None:
    """Compared with the descriptors, which another compiler made of the same protos."""
    from turnout.buffer.v1 import buffer_pb2
    from turnout.engine.v1 import engine_pb2
    from turnout.scheduler.v1 import events_pb2, scheduler_pb2

    for module in (buffer_pb2, engine_pb2, events_pb2, scheduler_pb2):
        descriptor = module.DESCRIPTOR
        _, _, blocks = read((ROOT / "protos" / descriptor.name).read_text(encoding="utf-8"))
        found = {(block.kind, block.name): [entry.name for entry in block.entries] for block in blocks}
        wanted = {
            ("message", one.name): [f.name for f in one.fields] for one in descriptor.message_types_by_name.values()
        }
        wanted |= {("enum", one.name): [v.name for v in one.values] for one in descriptor.enum_types_by_name.values()}
        wanted |= {("service", one.name): [m.name for m in one.methods] for one in descriptor.services_by_name.values()}
        assert {key: sorted(names) for key, names in found.items()} == {
            key: sorted(names) for key, names in wanted.items()
        }
        assert all(entry.comment for block in blocks for entry in block.entries)


def test_a_proto_that_cannot_be_read_is_an_error_not_a_gap() -> None:
    with pytest.raises(NotUnderstood, match="line 2"):
        read("message A {\n  string a = 1 [deprecated = true];\n}")


@pytest.mark.timeout(120)
async def test_the_session_of_the_readme_works(tmp_path: Path) -> None:
    """Reflection alone: the tool is given no proto."""
    if not BUF.exists() or shutil.which("node") is None:
        pytest.skip(f"{BUF.relative_to(ROOT)} not there; make protos-lint installs it")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.strip() for line in readme.splitlines() if line.strip().startswith("node_modules/.bin/buf curl")]
    assert len(commands) == 3
    service = Service("buffer")
    async with running(service):
        answers = []
        for command in commands:
            process = await asyncio.create_subprocess_shell(
                command.replace("127.0.0.1:50051", service.target),
                cwd=ROOT,
                env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            answers.append((await asyncio.wait_for(process.communicate(), 60))[0].decode())
            assert process.returncode == 0, answers[-1]
    methods, created, depth = answers
    assert "turnout.buffer.v1.ReplayBuffer/WaitForSampleable" in methods
    assert json.loads(created)["run"]["runId"] == "my-run"
    assert json.loads(depth)["depth"]["counts"] == {}
