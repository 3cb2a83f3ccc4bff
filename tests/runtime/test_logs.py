"""What goes to the log."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from services.runtime.logs import get_logger, setup_logs


@pytest.fixture(autouse=True)
def _restore_configuration() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_lines_are_json_on_stderr_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """stdout belongs to the lines that scripts read; a collector needs one JSON object for each line."""
    setup_logs("info", "auto")
    log = get_logger("buffer")
    log.debug("not logged")
    log.info("group evicted", group_id="g\n1", reason="stale")
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    entry = json.loads(line)
    assert entry["event"] == "group evicted"
    assert (entry["part"], entry["level"], entry["group_id"]) == ("buffer", "info", "g\n1")


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_secrets_are_masked(fmt: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A log is read by more people than may know a password."""
    setup_logs("info", fmt)
    get_logger("buffer").info("call", authorization="Bearer hunter2", auth_token="hunter2", tokens=42)
    err = capsys.readouterr().err
    assert "hunter2" not in err
    assert "***" in err
    assert "42" in err, "the tokens that engines generate are no secret"


def test_an_exception_is_logged_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """The incident id on the wire is worth nothing if the log does not tell what happened."""
    setup_logs("info", "json")
    get_logger("buffer").error("call failed", exc_info=KeyError("lost"))
    assert "KeyError: 'lost'" in json.loads(capsys.readouterr().err)["exception"]
