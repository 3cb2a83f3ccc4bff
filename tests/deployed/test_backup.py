"""The blocks of "Backup and restore" in docs/operations.md, as they stand there, against services that run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import pytest

from services.runtime.permissions import Role
from tests.buffer.helpers import Caller, output, result
from tests.deployed.manifests import ROOT
from tests.deployed.site import RUN, SERVICES, Site
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncSchedulerClient
from turnout.scheduler.v1 import scheduler_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GROUPS = 30
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """The code of the section, in order."""
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page[page.index("\n## Backup and restore\n") :]
    return [code for kind, code in BLOCK.findall(section) if kind == language]


@dataclass
class Operator:
    """Does what the page says, with the places of this site in place of its own."""

    site: Site
    backup: Path

    def shell(self, code: str) -> None:
        """Run a block line by line; systemd is this site."""
        for line in code.splitlines():
            words = line.split()
            if words[0] == "systemctl":
                for unit in words[2:]:
                    member = self.site.members[unit.removeprefix("turnout@")]
                    if words[1] == "start":
                        member.start()
                    elif member.alive:
                        assert member.stop() == 0
            elif words[0] == "turnout":
                done = self.site.turnout(*self._placed(line).split()[1:])
                assert done.returncode == 0, done.stdout + done.stderr
            else:
                subprocess.run(["sh", "-c", self._placed(line)], check=True, timeout=60)

    def python(self, code: str) -> None:
        """Run a block as an operator's script."""
        assert "trainer-0:50051" in code
        script = code.replace("trainer-0:50051", self.site.members["buffer"].target)
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            env={"PATH": "/usr/bin:/bin", **self.site.environment(Role.OPERATOR)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def _placed(self, line: str) -> str:
        return line.replace("/var/lib/turnout", str(self.site.root / "data")).replace("/backup", str(self.backup))


@pytest.fixture
def operator(site: Site, tmp_path: Path) -> Operator:
    backup = tmp_path / "backup"
    backup.mkdir()
    site.start(*SERVICES)
    return Operator(site, backup)


async def fill(caller: Caller) -> dict[str, bytes]:
    """Add groups with payloads, small, large and none, and leave some unfinished; what each finished one holds."""
    held = {}
    for number in range(GROUPS):
        name = f"g{number}"
        await caller.add(name, step=1, prompt=b"prompt %d" % number)
        if number % 5 == 4:
            continue
        data = bytes([number]) * (10 if number % 2 else 300_000 + number)
        made = output(number / 8, 3, 0)
        made.payload.ref.CopyFrom((await caller.put(data, google_crc32c.value(data))).ref)
        await caller.finish(result(name, 0, made))
        held[name] = data
    return held


async def read(caller: Caller) -> dict[str, bytes]:
    """What each finished group holds, byte for byte."""
    told = await caller.sample((await caller.depth(1)).sampleable, step=1)
    refs = [group.trajectories[0].outputs[0].payload.ref for group in told.groups]
    data = await caller.get(*refs, lease_id=told.done.lease_id)
    request = buffer_pb2.ReleaseSampleRequest(run_id=caller.run_id, epoch=caller.epoch, lease_id=told.done.lease_id)
    await caller.stub.ReleaseSample(request)
    return dict(zip(told.ids, data, strict=True))


async def test_a_copy_of_everything_brings_all_of_it_back(operator: Operator) -> None:
    """A disk that died took buffer, scheduler and controller with it."""
    site = operator.site
    copy, back = [code for code in blocks("sh") if "/backup/all" in code]
    buffer, scheduler = site.members["buffer"], site.members["scheduler"]
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create()
        held = await fill(caller)
        request = site.opening()
        caller.run_id = RUN
        await caller.create()
        async with AsyncSchedulerClient(scheduler.target, site.options(Role.TRAINER)) as client:
            caller.epoch = (await client.calls.OpenRun(request)).epoch
        held_in_run = await fill(caller)
        before = await caller.ledger()
        operator.shell(copy)
        await caller.add("of the time after the copy", step=1)
        for member in site.members.values():
            member.kill()
        operator.shell(back)
        assert await caller.ledger() == before
        assert await read(caller) == held_in_run
        caller.run_id, caller.epoch = "run", None
        assert await read(caller) == held
        async with AsyncSchedulerClient(scheduler.target, site.options(Role.TRAINER)) as client:
            found = (await client.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=RUN))).run
        assert (found.epoch, found.buffer_target) == (1, buffer.target)


async def test_a_checkpoint_copied_from_a_running_buffer_brings_a_run_back(operator: Operator) -> None:
    """The same without a stop: what was finished is there byte for byte, what was not is pending with its prompt."""
    site = operator.site
    checkpoint, restore = blocks("python")
    copy, back = [code for code in blocks("sh") if "/backup/checkpoints" in code]
    async with site.channel(site.members["buffer"].target) as channel:
        caller = Caller(channel, RUN)
        await caller.create()
        held = await fill(caller)
        operator.python(checkpoint)
        operator.shell(copy)
        await caller.finish_new("of the time after the checkpoint", step=1)
        site.members["buffer"].kill()
        operator.shell(back)
        operator.python(restore)
        assert await read(caller) == held
        pending = {group.group_id for group in await caller.groups(buffer_pb2.GROUP_STATE_PENDING)}
        assert pending == {f"g{number}" for number in range(4, GROUPS, 5)}
        prompts = {claim.group_id: claim.prompt.inline for claim in await caller.claim(100)}
        assert prompts == {f"g{number}": b"prompt %d" % number for number in range(4, GROUPS, 5)}


async def test_a_copy_taken_while_the_buffer_writes_is_refused(operator: Operator, tmp_path: Path) -> None:
    """What the page warns of: the journal of one moment with the mark of a later one is not all there was."""
    site = operator.site
    buffer = site.members["buffer"]
    assert buffer.data_dir is not None
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create()
        await caller.finish_new("before")
        torn = tmp_path / "torn"
        shutil.copytree(buffer.data_dir, torn)
        await caller.finish_new("after")
        shutil.copy(buffer.data_dir / "journal" / "journal.mark", torn / "journal" / "journal.mark")
    done = site.turnout("buffer", "audit", "--data-dir", str(torn))
    assert done.returncode != 0
    assert "JOURNAL_DAMAGED" in done.stderr
    assert "acknowledged records are missing" in done.stderr
