"""`turnout report`, as far as it needs no service."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.report import report
from services.views.run_events import write_events
from tests.views.stream import steps


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
