"""The process of a member, without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnout.ray._process import ServiceProcess, command, environment

STARTED_WITHIN_S = 40.0


def until_it_serves(process: ServiceProcess) -> None:
    ends = time.monotonic() + STARTED_WITHIN_S
    while not process.target:
        assert time.monotonic() < ends, list(process.last_lines)
        time.sleep(0.02)


def test_a_folder_of_the_users_own_named_services_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray runs workers in the job's directory and puts it on PYTHONPATH; the name is a common one."""
    package = tmp_path / "services"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the wrong services')\n")
    monkeypatch.chdir(tmp_path)
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), ""])}
    process = ServiceProcess(
        command("buffer", ["--listen", "127.0.0.1:0", "--log-level", "warning"]),
        environment(ours, {}, keep_gpus=False),
    )
    try:
        until_it_serves(process)
    finally:
        process.stop(10.0)
    assert process.wait() == 0


def test_other_entries_of_the_path_stay(tmp_path: Path) -> None:
    """A site may have its packages there, ours among them."""
    other = tmp_path / "site"
    other.mkdir()
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(other), str(root)])
    assert environment({"PYTHONPATH": path}, {}, keep_gpus=False)["PYTHONPATH"] == path


def test_an_agent_for_which_ray_reserves_no_gpus_sees_those_of_the_machine() -> None:
    """Ray hides all GPUs from an actor without any; on a hybrid node the trainer's actors have them."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert "CUDA_VISIBLE_DEVICES" not in environment(hidden, {}, keep_gpus=False)
    assert environment({"CUDA_VISIBLE_DEVICES": "3"}, {}, keep_gpus=True) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert environment(hidden, {"CUDA_VISIBLE_DEVICES": "1"}, keep_gpus=False) == {"CUDA_VISIBLE_DEVICES": "1"}


PARENT = """
import os, sys, threading, time
from turnout.ray._process import ServiceProcess, command, environment

process = ServiceProcess(command("buffer", ["--listen", "127.0.0.1:0"]), environment(os.environ, {}, keep_gpus=False))
while not process.target:
    time.sleep(0.02)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_actor_leaves_no_service_behind() -> None:
    """It would keep the port and the journal, and the actor that Ray starts instead would never serve."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        ends = time.monotonic() + STARTED_WITHIN_S
        while _runs(child):
            assert time.monotonic() < ends
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
