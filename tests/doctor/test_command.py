"""`turnout doctor` as a user runs it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from services.cli.doctor import doctor
from tests.doctor.test_checks import _free_port
from tests.observability.loop import RUN, job, services


def _run(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(doctor, [*arguments, "--json"])
    told: dict[str, Any] = json.loads(result.output)
    return result.exit_code, told


def _ports() -> list[str]:
    """Places that are free, in place of the defaults, which something may have on this machine."""
    return [text for name in ("buffer", "engine", "scheduler") for text in (f"--{name}", f"127.0.0.1:{_free_port()}")]


async def test_all_is_well_around_services_that_run(tmp_path: Path) -> None:
    """Exit code 0 and a finding for every part: scripts rest on both."""
    async with services(tmp_path) as house, job(house.targets, 1):
        targets = ("--buffer", house.buffer.target, "--engine", house.engine.target)
        others = ("--scheduler", house.scheduler.target, "--target", house.agent.target)
        command = (sys.executable, "-P", "-m", "services.cli.main", "doctor", *targets, *others, "--json")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
    told = json.loads(output)
    wrong = [one for one in told["findings"] if one["verdict"] == "problem" and one["check"] != "files"]
    assert wrong == []
    assert {"versions", "shadowing", "files", "health", "clock"} <= {one["check"] for one in told["findings"]}
    engines = {one["subject"]: one["text"] for one in told["findings"] if one["check"] == "engines"}
    assert set(engines) == {f"{RUN} hybrid-0", f"{RUN} standalone-0"}
    assert "sleep" in engines[f"{RUN} hybrid-0"]
    assert told["ok"] is (process.returncode == 0)


def test_a_target_that_was_named_and_does_not_answer() -> None:
    """The exit code is what a deployment script looks at."""
    code, told = _run(*_ports())
    assert code == 1
    assert [one["text"] for one in told["findings"] if one["check"] == "port"] == ["nobody listens"] * 3


def test_settings_name_the_disk_and_what_is_wrong_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in a YAML file shows before the service is started on every node."""
    (tmp_path / "buffer.yaml").write_text(f"data_dir: {tmp_path / 'data'}\n")
    (tmp_path / "engine.yaml").write_text("data_dri: /x\n")
    monkeypatch.setenv("TURNOUT_CONFIG", str(tmp_path / "engine.yaml"))
    config = [f"--config={name}={tmp_path / name}.yaml" for name in ("buffer", "engine")]
    _, told = _run(*_ports(), *config)
    by_check: dict[str, list[dict[str, str]]] = {}
    for one in told["findings"]:
        by_check.setdefault(one["check"], []).append(one)
    assert [one["subject"] for one in by_check["fsync"]] == [str(tmp_path / "data")]
    (problem,) = (one for one in by_check["settings"] if one["verdict"] == "problem")
    assert "data_dri" in problem["text"]
    assert not (tmp_path / "data").exists(), "looking must not make anything"


def test_the_table_ends_with_what_to_do() -> None:
    """On a terminal the end is what is seen."""
    result = CliRunner().invoke(doctor, _ports(), env={"COLUMNS": "200"})
    lines = result.output.rstrip().splitlines()
    assert "problems" in lines[-1]
    assert any(line.startswith("  do: start it there") for line in lines[-12:])


def test_a_config_for_no_service_is_refused() -> None:
    """Silently not looking at a file would pass for all being well."""
    result = CliRunner().invoke(doctor, ["--config", "bufer=x.yaml"])
    assert result.exit_code == 2
