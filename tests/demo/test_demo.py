"""The demo with real processes, at a size and speed that fit a test."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import alive, descendants, running, stop, turnout

TINY = ("--steps", "2", "--mini-batch-size", "2", "--group-size", "2", "--time-scale", "0.003")
GROUPS = 2 * 2 * 4
KEYS = {
    "wall_clock_s",
    "tokens_per_s",
    "trainer_idle_share",
    "steps",
    "lends",
    "reclaims",
    "lost_groups",
    "duplicated_groups",
    "mean_staleness",
}


def outsider(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the figures from the event file as docs/demo.md says, without our own code."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_name.setdefault(line["event"], []).append(line)
    began, ended = by_name["job_began"][0]["at"], by_name["job_ended"][0]["at"]
    trained = by_name["group_trained"]
    trainer = [*by_name["trainer"], {"at": ended, "state": ""}]
    waited = sum(b["at"] - a["at"] for a, b in itertools.pairwise(trainer) if a["state"] == "waiting")
    lends = reclaims = 0
    open_lend = False
    for line in lines:
        if line["event"] == "lend":
            open_lend = line["kind"] in ("step_end", "within_step")
            lends += open_lend
        if line["event"] == "reclaim":
            reclaims += open_lend
            open_lend = False
    times = Counter(line["group_id"] for line in trained)
    gone = {line["group_id"] for line in by_name.get("group_left", []) if line["how"] == "evicted"} | set(times)
    lost = len({line["group_id"] for line in by_name["group_added"]} - gone) - by_name["ledger"][0]["present"]
    return {
        "wall_clock_s": ended - began,
        "tokens_per_s": sum(sum(line["tokens"]) for line in trained) / (ended - began),
        "trainer_idle_share": waited / (ended - began),
        "steps": len(by_name["step_ended"]),
        "lends": lends,
        "reclaims": reclaims,
        "lost_groups": lost,
        "duplicated_groups": sum(times.values()) - len(times),
        "mean_staleness": statistics.mean(value for line in trained for value in line["staleness"]),
    }


def test_the_demo_runs_end_to_end_and_an_outsider_gets_the_same_figures(tmp_path: Path) -> None:
    """The whole house: every process, both modes, the events, the figures, the picture; and nothing left behind."""
    events, picture = tmp_path / "events.jsonl", tmp_path / "picture.png"
    done = turnout("demo", *TINY, "--events", str(events), "--picture", str(picture), "--json")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    answer = json.loads(done.stdout)
    assert list(answer) == ["seeds"]
    (seed,) = answer["seeds"]
    assert set(seed) == {"seed", "off", "on"}
    lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    delivered = {}
    for mode in ("off", "on"):
        of_mode = [line for line in lines if line["mode"] == mode and line["seed"] == 0]
        assert [line["at"] for line in of_mode] == sorted(line["at"] for line in of_mode)
        figures = seed[mode]
        assert set(figures) == KEYS
        assert figures == pytest.approx(outsider(of_mode), rel=1e-3, abs=2e-3)
        assert (figures["steps"], figures["lost_groups"], figures["duplicated_groups"]) == (2, 0, 0)
        assert figures["lends"] <= 1
        assert 0 < figures["trainer_idle_share"] < 1
        trained = [line for line in of_mode if line["event"] == "group_trained"]
        assert len(trained) == GROUPS
        delivered[mode] = {line["group_id"]: (line["tokens"], line["digest"]) for line in trained}
        replicas = {line["replica_id"] for line in of_mode if line["event"] == "replica"}
        assert len(replicas) == 6
    assert delivered["off"] == delivered["on"]
    assert seed["off"]["lends"] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something is true of a running command."""
    give_up = time.monotonic() + 40
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.05)


def working(process: subprocess.Popen[str], tmp_path: Path) -> set[int]:
    """Wait until the trainer trains, and return all processes of the demo."""

    def trains() -> bool:
        return any(b"services.demo.trainer" in command_line(pid) for pid in descendants(process.pid))

    wait_for(trains, process)
    return descendants(process.pid)


def command_line(pid: int) -> bytes:
    """Return how a process was started; empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Nine processes that go on after Ctrl-C would slow down everything that follows."""
    with running("demo", *TINY, "--time-scale", "0.1", "--no-picture") as process:
        children = working(process, tmp_path)
        assert len(children) == 9
        ended, out, err = stop(process, number)
        assert ended == code, err
        assert out == ""
        assert "Traceback" not in err
        assert not any(map(alive, children))


def test_a_process_that_dies_ends_the_demo_with_its_name(tmp_path: Path) -> None:
    """A demo that hangs because one of nine processes has died would be the worst first impression."""
    with running("demo", *TINY, "--time-scale", "0.1", "--no-picture") as process:
        children = working(process, tmp_path)
        victim = next(pid for pid in children if b"standalone-0:standalone" in command_line(pid))
        os.kill(victim, signal.SIGKILL)
        _, err = process.communicate(timeout=50)
        assert process.returncode == 1
        assert "agent of standalone-node-0 was ended by SIGKILL while seed 0 ran with switching off" in err
        assert "Traceback" not in err
        assert not any(map(alive, children))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "nope"], "there is no policy 'nope'; there are: "),
        (["--prompts", "/nonexistent.jsonl"], "/nonexistent.jsonl: cannot be read"),
        (["--events", "/nonexistent/events.jsonl"], "/nonexistent/events.jsonl: cannot be written"),
        (["--picture", "/nonexistent/demo.png"], "/nonexistent/demo.png: cannot be written"),
        (["--time-scale", "0"], "--time-scale"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(arguments: list[str], message: str) -> None:
    """Five minutes into a demo is too late to learn that the events go nowhere."""
    done = turnout("demo", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
