"""Child processes: ready, failing, stubborn, and never left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.processes.child import ChildFailed, ChildSpec
from services.processes.fleet import Fleet

READY = re.compile(r"^ready (?P<target>\S+)$")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a module whose behaviour its first argument chooses, and return its name."""
    (tmp_path / "odd_program.py").write_text(
        """
import os, signal, sys, time
what = sys.argv[1]
print("noise on stderr", file=sys.stderr, flush=True)
if what == "fail":
    print("the last word", file=sys.stderr, flush=True)
    sys.exit(3)
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "flood":
    sys.stderr.write("x" * 200 + "\\n" * 5000)
    for number in range(5000):
        print("line", number)
if what != "silent":
    print("ready", os.getpid(), flush=True)
if what == "short":
    print("done", flush=True)
    sys.exit(0)
while True:
    time.sleep(60)
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "odd_program"


def spec(program: str, what: str) -> ChildSpec:
    """Return the spec of a child that behaves as `what`."""
    return ChildSpec(what, program, (what,), ready=READY)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_children_are_ended_when_the_fleet_is_left(program: str) -> None:
    """A demo that leaves processes behind would hold its ports for the next one."""
    async with Fleet() as fleet:
        children = await fleet.start_all(*(spec(program, "obedient") for _ in range(3)))
        pids = [int(child.target) for child in children]
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


async def test_a_child_that_ignores_sigterm_is_killed(program: str) -> None:
    """One stuck process must not keep the command from ending."""
    async with Fleet(grace_s=0.2) as fleet:
        child = await fleet.start(spec(program, "deaf"))
    assert child.ended.result() == -signal.SIGKILL


async def test_a_child_that_fails_at_its_start_is_reported_with_its_last_lines(program: str) -> None:
    """'It did not start' alone would send people hunting for logs that are gone."""
    async with Fleet() as fleet:
        with pytest.raises(ChildFailed, match="fail ended with exit code 3") as caught:
            await fleet.start(spec(program, "fail"))
    assert caught.value.last_lines[-1] == "the last word"


async def test_a_child_that_never_gets_ready_is_reported(program: str) -> None:
    """A hanging start must end the command, with a reason."""
    async with Fleet() as fleet:
        with pytest.raises(ChildFailed, match="silent was not ready within"):
            await fleet.start(spec(program, "silent"), ready_within_s=0.3)


async def test_work_ends_when_a_child_does(program: str) -> None:
    """A job whose worker has died would otherwise wait for ever."""
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with Fleet() as fleet:
        child = await fleet.start(spec(program, "obedient"))
        running = asyncio.create_task(fleet.run(work()))
        await asyncio.sleep(0)
        os.kill(int(child.target), signal.SIGKILL)
        with pytest.raises(ChildFailed, match="was ended by SIGKILL"):
            await running
    assert cancelled.is_set()


async def test_a_child_that_is_meant_to_end_fails_nothing(program: str) -> None:
    """The trainer's end is the end of the job, not a fault."""
    lines: list[str] = []

    async with Fleet() as fleet:
        await fleet.start(spec(program, "obedient"))
        trainer = await fleet.start(spec(program, "short"), on_line=lines.append)
        assert await fleet.run(fleet.finish(trainer)) == 0
    assert lines == ["done"]


async def test_a_child_that_writes_much_is_not_blocked(program: str) -> None:
    """A full pipe stops a process in the middle of a write."""
    lines: list[str] = []
    async with Fleet() as fleet:
        child = await fleet.start(spec(program, "flood"), on_line=lines.append)
        assert len(lines) == 5000
        assert len(child.last_lines) == 40


def test_children_end_with_a_parent_that_is_killed(program: str) -> None:
    """kill -9 on the command gives it no chance to clean up; the kernel has to tell the children."""
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"child = subprocess.Popen([sys.executable, '-m', 'services.processes.leash', {program!r}, 'obedient'])\n"
            "time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[1])
    parent.kill()
    # The pipe closes when its last writer, the child, goes: a little before it has gone.
    assert parent.stdout.read() == ""
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)
