"""`up`, `status` and `top` with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

from services.cli.targets import forget_security
from services.runtime.permissions import Role
from tests.cli.helpers import alive, descendants, running, stop, turnout
from tests.security.houses import Tokens
from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, ClientOptions, SchedulerClient, Security
from turnout.scheduler.v1 import scheduler_pb2

LINE = re.compile(r"turnout (buffer|engine|scheduler) listening on (\S+)")
FREE = ("--buffer", "127.0.0.1:0", "--engine", "127.0.0.1:0", "--scheduler", "127.0.0.1:0")


def targets_of(process: subprocess.Popen[str]) -> dict[str, str]:
    """Read the three lines that `up` prints."""
    assert process.stdout is not None
    found = [LINE.fullmatch(process.stdout.readline().strip()) for _ in range(3)]
    return {match[1]: match[2] for match in found if match}


def flags(targets: dict[str, str]) -> list[str]:
    """Return the options that name the targets."""
    return [text for name, target in targets.items() for text in (f"--{name}", target)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_runs_three_services_that_status_finds_and_stops_them_in_order(number: signal.Signals) -> None:
    """The first thing a newcomer starts: it must be found, and leave no process when it is stopped."""
    with running("up", *FREE) as process:
        targets = targets_of(process)
        assert set(targets) == {"buffer", "engine", "scheduler"}
        children = descendants(process.pid)
        assert len(children) == 3
        done = turnout("status", *flags(targets), "--json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert {service["service"]: service["problem"] for service in answer["services"]} == dict.fromkeys(targets, "")
        assert answer["runs"] == []
        assert "no runs" in turnout("status", *flags(targets)).stdout
        code, _, err = stop(process, number)
        assert code == 0, err
        assert not any(map(alive, children))


def test_up_with_reference_engines_needs_nothing_else_and_registering_again_is_fine() -> None:
    """Without it a newcomer has services and nothing that generates."""
    with running("up", "--run", "a run", "--reference", "2:1", *FREE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(5)]
        assert lines[-1] == "turnout run a run: hybrid-0, hybrid-1, standalone-0"
        targets = dict(re.findall(r"turnout (\w+) listening on (\S+)", "\n".join(lines)))
        where = ("a run", "--engine", targets["engine"])
        again = turnout("engine", "register", *where, "--agent", targets["agent"])
        assert (again.returncode, [line.split()[0] for line in again.stdout.splitlines()]) == (
            0,
            ["hybrid-0", "hybrid-1", "standalone-0"],
        )
        taken = turnout(
            "engine", "register", *where, "--replica", "other:hybrid", "--backend", "agent", "--gpu", "other=n"
        )
        assert (taken.returncode, "ID=NODE/UUID" in taken.stderr) == (2, True)
        gone = turnout("engine", "register", *where, "--agent", "127.0.0.1:1")
        assert (gone.returncode, "UNAVAILABLE" in gone.stderr) == (1, True)
        code, _, err = stop(process)
        assert (code, "replica died" in err) == (0, False)


def test_up_registers_its_engines_with_the_callers_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of the services may not register: with it, nothing came up where tokens were on."""
    tokens = Tokens(tmp_path / "tokens.yaml", run="r")
    held = {role: tmp_path / role for role in (Role.SERVICE, Role.TRAINER, Role.READER)}
    for role, path in held.items():
        path.write_text(tokens.of(role))
    locked = ("--tokens-file", str(tokens.write()), "--peer-token-file", str(held[Role.SERVICE]))
    command = ("up", "--run", "r", "--reference", "1:1", *FREE, *locked)
    monkeypatch.delenv("TURNOUT_TOKEN_FILE", raising=False)
    without = turnout(*command)
    assert (without.returncode, "TURNOUT_TOKEN_FILE" in without.stderr) == (2, True)
    monkeypatch.setenv("TURNOUT_TOKEN_FILE", str(held[Role.TRAINER]))
    with running(*command) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(5)]
        assert lines[-1] == "turnout run r: hybrid-0, standalone-0"
        targets = dict(LINE.findall("\n".join(lines)))
        reader = ("status", *flags(targets), "--token-file", str(held[Role.READER]), "--json")
        # A token of one run may ask for that run alone.
        assert "RUN_NOT_ALLOWED" in turnout(*reader).stdout
        told = turnout(*reader, "--run", "r")
        assert told.returncode == 0, told.stdout
        assert turnout(*reader, "--run", "other").returncode == 1
        assert stop(process)[0] == 0


def test_up_with_reference_engines_serves_the_metrics_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines' agent took the controller's port from the environment, and nothing came up."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("TURNOUT_ENGINE_METRICS_LISTEN", f"127.0.0.1:{port}")
    with running("up", "--run", "r", "--reference", "1:1", *FREE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(5)]
        assert lines[-1] == "turnout run r: hybrid-0, standalone-0", process.stderr and process.stderr.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/sd", timeout=20) as answer:
            assert [one["labels"]["service"] for one in json.load(answer)] == ["engine", "agent"]
        assert stop(process)[0] == 0


@pytest.mark.parametrize("arguments", [("--run", "a"), ("--reference", "1:1"), ("--run", "a", "--reference", "1:0")])
def test_up_refuses_half_of_an_engine_set(arguments: tuple[str, ...]) -> None:
    """Before anything is started."""
    done = turnout("up", *arguments)
    assert (done.returncode, done.stdout) == (2, "")


def test_up_with_a_data_directory_remembers_runs(tmp_path: Path) -> None:
    """A person who stops it over night finds the run in the morning."""
    kept = ("--data-dir", str(tmp_path / "data"))
    with running("up", *FREE, *kept) as process:
        open_run(targets_of(process), "night")
        assert stop(process, signal.SIGTERM)[0] == 0
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["buffer", "engine", "scheduler"]
    with running("up", *FREE, *kept) as process:
        targets = targets_of(process)
        (run,) = json.loads(turnout("status", *flags(targets), "--json").stdout)["runs"]
        assert (run["run_id"], run["in_flight"]) == ("night", 1)
        assert stop(process, signal.SIGTERM)[0] == 0


def open_run(targets: dict[str, str], run_id: str) -> None:
    """Open a run that nothing is lent for."""
    with BufferClient(targets["buffer"]) as buffer, SchedulerClient(targets["scheduler"]) as scheduler:
        buffer.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id=run_id))
        buffer.calls.AddGroups(
            buffer_pb2.AddGroupsRequest(
                run_id=run_id, partition="train", step=0, groups=[buffer_pb2.GroupSpec(group_id="g")]
            )
        )
        config = scheduler_pb2.RunConfig(
            train_batch_size=1,
            parameter_sync_step=1,
            mini_batch_size=1,
            total_training_steps=1,
            standalone_gpus=4,
        )
        scheduler.calls.OpenRun(
            scheduler_pb2.OpenRunRequest(
                run_id=run_id, config=config, buffer_target=targets["buffer"], engine_target=targets["engine"]
            )
        )


def test_status_top_and_report_show_a_run(tmp_path: Path) -> None:
    """The views of a run that exists: what operators look at all day, and what they hand on."""
    with running("up", *FREE) as process:
        targets = targets_of(process)
        open_run(targets, "run [1]")
        (run,) = json.loads(turnout("status", *flags(targets), "--json").stdout)["runs"]
        assert (run["run_id"], run["open"], run["mode"], run["in_flight"]) == ("run [1]", True, "TRAINER", 1)
        assert "run [1]" in turnout("status", *flags(targets)).stdout
        done = turnout("top", "--once", "--scheduler", targets["scheduler"])
        assert done.returncode == 0, done.stderr
        assert "run [1]" in done.stdout
        assert "opened with epoch 1" in done.stdout
        file, page = tmp_path / "run.jsonl", tmp_path / "report.html"
        file.write_text(turnout("events", "--scheduler", targets["scheduler"]).stdout)
        for source in (("--scheduler", targets["scheduler"]), ("--events", str(file), "run [1]")):
            done = turnout("report", "-o", str(page), *source)
            assert done.returncode == 0, done.stderr
            assert "<h1>run [1]</h1>" in page.read_text()
            page.unlink()
        other = turnout("top", "--once", "--run", "other", "--scheduler", targets["scheduler"])
        assert other.returncode == 1
        assert "RUN_NOT_FOUND" in other.stderr
        assert stop(process)[0] == 0


def test_up_ends_with_the_reason_when_a_port_is_taken() -> None:
    """Two of three services running and no word about the third would be worse than none."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = turnout("up", *FREE[:4], "--scheduler", address)
    assert done.returncode == 1
    assert "scheduler ended with exit code 1" in done.stderr
    assert "address in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_up_ends_when_one_service_dies() -> None:
    """A house with a missing service hangs its callers; better it is down and says why."""
    with running("up", *FREE) as process:
        targets_of(process)
        children = descendants(process.pid)
        victim = min(children)
        os.kill(victim, signal.SIGKILL)
        _, err = process.communicate(timeout=40)
        assert process.returncode == 1
        assert "was ended by SIGKILL" in err
        assert not any(map(alive, children))


def test_status_of_services_that_are_not_there_is_a_failure_without_traceback() -> None:
    """Scripts watch the exit code; people read which one is missing."""
    done = turnout("status", "--json", *flags(dict.fromkeys(("buffer", "engine", "scheduler"), "127.0.0.1:1")))
    assert done.returncode == 1
    services = json.loads(done.stdout)["services"]
    assert all(service["problem"] == "does not answer (UNAVAILABLE)" for service in services)
    assert done.stderr == ""


def test_top_without_a_scheduler_says_so() -> None:
    """A live view of nothing must not hang."""
    done = turnout("top", "--once", "--scheduler", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("turnout: the scheduler at 127.0.0.1:1: UNAVAILABLE")
    assert len(done.stderr.splitlines()) == 1


def test_a_demo_forgets_how_other_services_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own services are plain: a certificate or token for a cluster would only keep it away from them."""
    for name in ("CA", "CERT", "KEY", "SERVER_NAME", "TOKEN", "TARGET_BUFFER"):
        monkeypatch.setenv(f"TURNOUT_{name}", "x")
    monkeypatch.setenv("TURNOUT_TOKEN_FILE", "")
    forget_security()
    assert ClientOptions().security == Security()
    assert os.environ["TURNOUT_TARGET_BUFFER"] == "x"
