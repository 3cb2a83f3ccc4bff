"""`up`, `status` and `top` with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess

import pytest

from tests.cli.helpers import alive, descendants, running, stop, turnout

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
