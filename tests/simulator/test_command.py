"""`turnout simulate`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.simulate import simulate_command

SHORT = ["--workload", "tiny-batch", "--steps", "4"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(simulate_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_is_one_object_a_line_with_the_documented_keys() -> None:
    """Scripts read it."""
    lines = invoke(*SHORT, "--policy", "verl,jit", "--seeds", "2", "--json").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["policy"], row["seed"]) for row in rows] == [("verl", 0), ("jit", 0), ("verl", 1), ("jit", 1)]
    assert list(rows[0]) == [
        "workload",
        "policy",
        "seed",
        "hours",
        "trainer_idle_share",
        "lends",
        "mean_staleness",
    ]


def test_table_and_picture(tmp_path: Path) -> None:
    """People read these; `off` is simulated though not asked for, since savings need it."""
    picture = tmp_path / "gain.png"
    text = invoke(*SHORT, "--policy", "verl", "--oracle", "--picture", str(picture))
    assert all(word in text for word in ("off", "verl", "oracle", "saved"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_more_steps_than_there_are_prompts_are_left_out() -> None:
    """`--workload all --steps 60` ended in a trainer that waited for nothing."""
    own, more = (
        [
            json.loads(line)["hours"]
            for line in invoke("--workload", "demo", "--policy", "verl", "--json", *steps).splitlines()
        ]
        for steps in ([], ["--steps", "60"])
    )
    assert own == more


def test_list_names_the_workloads() -> None:
    """Nobody guesses names."""
    assert "slow-prefill" in invoke("--list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nope"], "neither a file nor one of calibrated"),
        (["--policy", "nope"], "--policy: policy must be one of off"),
        (["--policy", ","], "names no policy"),
        (["--seeds", "0"], "--seeds"),
    ],
)
def test_a_wrong_command_line_exits_2(arguments: list[str], message: str) -> None:
    """One line that names what is wrong, no traceback."""
    result = CliRunner().invoke(simulate_command, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_picture_that_cannot_be_written_exits_1(tmp_path: Path) -> None:
    """An hour of simulation must not end in a traceback."""
    result = CliRunner().invoke(simulate_command, [*SHORT, "--picture", str(tmp_path / "no" / "gain.png")])
    assert result.exit_code == 1
    assert "the picture cannot be written" in result.output
