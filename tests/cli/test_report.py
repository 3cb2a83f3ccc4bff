"""`turnout report` and `turnout explain`, as far as they need no service."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.explain import explain_command
from services.cli.report import report
from services.views.run_events import write_events
from tests.views.stream import steps
from turnout.scheduler.v1 import events_pb2


@pytest.mark.parametrize("ending", ["html", "png"])
def test_a_report_is_made_from_a_file_of_events(tmp_path: Path, ending: str) -> None:
    """When the cluster is gone the file is what is left; no half-written report stays behind."""
    events, output = tmp_path / "grpo.jsonl", tmp_path / f"out.{ending}"
    write_events(steps(2), events)
    result = CliRunner().invoke(report, ["--events", str(events), "-o", str(output)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"report: {output}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grpo.jsonl", output.name]


def test_what_cannot_be_reported_is_said_in_one_line(tmp_path: Path) -> None:
    """A wrong ending, a file of something else, a directory that is not there."""
    other, events = tmp_path / "other.jsonl", tmp_path / "run.jsonl"
    other.write_text('{"seed": 0, "event": "job_began"}')
    write_events(steps(1), events)
    for arguments, message in (
        (["-o", "report.pdf"], "the ending has to be one of .html, .png"),
        (["--events", str(other)], "line 1: no run event"),
        (["--events", str(events), "-o", str(tmp_path / "no" / "report.html")], "cannot be written: No such file"),
    ):
        result = CliRunner().invoke(report, arguments)
        assert result.exit_code != 0
        assert message in result.stderr


def test_a_run_is_explained_step_by_step(tmp_path: Path) -> None:
    """One sentence a decision, predicted against realised; a step alone comes with its numbers."""
    events = tmp_path / "grpo.jsonl"
    write_events(steps(4), events)
    source = ["--events", str(events)]
    text = CliRunner().invoke(explain_command, source, catch_exceptions=False).stdout
    assert text.count("Reclaimed at 41 groups") == 3
    assert [line for line in text.splitlines() if line.startswith("step ")][3].startswith("step 4, ")
    assert "20 s were predicted" in text
    assert "gain_seconds" not in text
    one = CliRunner().invoke(explain_command, ["grpo", "2", *source], catch_exceptions=False).stdout
    assert one.startswith("step 2, ")
    assert "gain_seconds = 12.5" in one
    assert "tokens decoded" in one
    rows = [json.loads(line) for line in CliRunner().invoke(explain_command, [*source, "--json"]).stdout.splitlines()]
    assert len(rows) == 7
    assert {"step", "action", "reason", "numbers", "predicted_wait_seconds"} <= set(rows[0])
    missing = CliRunner().invoke(explain_command, ["grpo", "9", *source])
    assert missing.exit_code == 1
    assert "nothing is kept of step 9 of grpo: there are 1 to 4" in missing.stderr


def test_an_explanation_says_what_a_lend_gained_against_its_prediction(tmp_path: Path) -> None:
    """Tokens alone do not tell a lend that paid from one that cost."""
    told = steps(4)
    lent = [event.lend_done.lend_id for event in told if event.HasField("lend_done")]
    for lend_id, gained in zip(lent, (18.0, -7.0), strict=False):
        brought = events_pb2.LendGoodput(lend_id=lend_id, gained_seconds=gained)
        told.append(events_pb2.RunEvent(sequence=len(told) + 1, at=told[-1].at, lend_goodput=brought))
    events = tmp_path / "grpo.jsonl"
    write_events(told, events)
    text = CliRunner().invoke(explain_command, ["--events", str(events)], catch_exceptions=False).stdout
    assert "18 s less lost than the predicted wait without it" in text
    assert "7 s more lost than the predicted wait without it" in text
