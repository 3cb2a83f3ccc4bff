"""The unit and the job's script, as far as they run without systemd and Slurm."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from services.engine.settings import EngineSettings
from services.runtime.config import load_settings

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "turnout@.service"
JOB = ROOT / "deploy" / "slurm" / "job.sh"

STUBS = {
    "hostname": "echo trainer-0",
    "scontrol": "printf 'rollout-0\\nrollout-1\\n'",
    # One node in place of all.
    "srun": 'while [ "$1" != sh ]; do shift; done; exec "$@"',
    "sleep": "exit 0",
    "turnout": """echo "$*" >> calls
case "$1" in
  up) trap 'echo ended >> calls; exit 0' TERM; touch up; while :; do /bin/sleep 0.1; done;;
  engine) until [ -e up ]; do /bin/sleep 0.01; done;;
esac
if [ "$*" = "engine register my-run --engine trainer-0:50052 --agent rollout-1:50061" ] && [ ! -e asked ]; then
  touch asked; exit 1
fi""",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the commands that the script calls, which write down how."""
    for name, body in STUBS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    return tmp_path


def _job(place: Path, *trainer: str) -> subprocess.CompletedProcess[str]:
    own = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NAME": "grpo", "ROLLOUT_NODES": "rollout-[0-1]"}
    command = ["bash", str(JOB), *trainer]
    return subprocess.run(command, cwd=place, env=own, capture_output=True, text=True, timeout=60, check=False)


def test_a_job_ends_as_its_trainer_does_and_takes_the_services_along(place: Path) -> None:
    """A job that ended well while its trainer failed is not run again; killed services lose nothing but time."""
    assert _job(place, "bash", "-c", "exit 7").returncode == 7
    assert "ended" in (place / "calls").read_text().splitlines()
    done = _job(place, "true")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_agent_is_registered_however_late_it_is_there(place: Path) -> None:
    """Loading a model takes minutes, and the script is there at once."""
    _job(place, "true")
    registers = [line for line in (place / "calls").read_text().splitlines() if line.startswith("engine register")]
    first, second = (f"engine register my-run --engine trainer-0:50052 --agent rollout-{n}:50061" for n in (0, 1))
    assert registers == [first, second, second]


def test_a_job_whose_services_end_at_once_ends_too(place: Path) -> None:
    """A port in use or a full disk would otherwise hold the nodes until the job's time is over."""
    (place / "bin" / "turnout").write_text('#!/bin/bash\n[ "$2" = serve ]\n')
    done = _job(place, "touch", "trained")
    assert done.returncode == 1
    assert not (place / "trained").exists()


def test_the_arguments_are_those_that_services_take(place: Path) -> None:
    """A flag that was renamed ends the job in the queue's small hours."""
    _job(place, "true")
    calls = (place / "calls").read_text().splitlines()
    (up,) = (line.split()[1:] for line in calls if line.startswith("up "))
    assert up[:2] == ["--data-dir", "/local/grpo/turnout"]
    (agent,) = (line.split()[2:] for line in calls if line.startswith("engine serve"))
    flags = dict(zip(agent[3::2], agent[4::2], strict=True))
    assert agent[:3] == ["--agent", "--insecure", "--no-replica-weights"]
    settings = load_settings(
        EngineSettings,
        flags={
            "agent": True,
            "insecure": True,
            "replica_weights": False,
            "listen": [flags["--listen"]],
            "replica": [flags["--replica"]],
            "vllm_config": flags["--vllm-config"],
        },
    )
    assert settings.replica == ["trainer-0-0:standalone"]


def test_the_script_has_no_trap_of_the_shells() -> None:
    """An unquoted name splits at a blank, on somebody's cluster."""
    checker = shutil.which("shellcheck", path=str(ROOT / ".shellcheck/usr/bin")) or shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not here; make test-deploy fetches it")
    done = subprocess.run([checker, str(JOB)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not there")
def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    """A misspelt line is ignored with a warning in a log."""
    unit = tmp_path / "turnout@buffer.service"
    unit.write_text(UNIT.read_text().replace("/opt/turnout/bin/turnout", "/bin/true"))
    command = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_can_be_enabled_and_its_instances_share_no_directory() -> None:
    """`systemctl enable` refuses a unit that nothing wants; users of DynamicUser chown a shared one from each other."""
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    service = unit["Service"]
    assert service["ExecStart"].endswith(f"--data-dir /var/lib/{service['StateDirectory']}")
    assert "%i" in service["StateDirectory"]
    assert "DynamicUser" not in service, "cp -a of /var/lib/turnout would copy a link: docs/operations.md"
    assert int(service["TimeoutStopSec"]) > EngineSettings().grace_s
    assert unit["Unit"]["StartLimitIntervalSec"] == "0", "five failures in a row end it for good"
