"""The command as a whole: help, wrong usage, failures."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest

from services.cli import main
from services.cli.failures import CommandFailed
from services.cli.lazy import LazyGroup
from tests.cli.helpers import turnout


def all_commands() -> list[list[str]]:
    """Return the words of every command there is."""
    found: list[list[str]] = []

    def walk(command: click.Command, words: list[str]) -> None:
        found.append(words)
        if isinstance(command, LazyGroup):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                walk(child, [*words, name])

    walk(main.cli, [])
    return found


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_every_command_has_help_that_teaches(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command whose help fails, or shows nothing to try, sends its user to the source."""
    assert main.run([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: turnout {' '.join(words)}".rstrip())
    if words[-1:] not in (["buffer"], ["engine"], ["scheduler"]):
        assert "Examples:" in out
        assert "  turnout" in out


def test_help_imports_nothing_heavy() -> None:
    """Help that imports gRPC, numpy or matplotlib takes a second instead of a blink."""
    code = (
        "import sys; from services.cli.main import run; assert run(['--help']) == 0; "
        "assert run(['buffer', '--help']) == 0; "
        "print([m for m in ('grpc', 'numpy', 'matplotlib', 'pydantic', 'rich.live', 'uvloop') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_unknown_command_names_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """A slip of the keyboard should cost one more try, not a look into the manual."""
    assert main.run(["statsu"]) == 2
    assert "Did you mean 'status'?" in capsys.readouterr().err
    assert main.run(["buffer", "server"]) == 2
    assert "Did you mean 'serve'?" in capsys.readouterr().err


def test_an_unknown_command_that_resembles_none_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a near match the user still has to learn what there is."""
    assert main.run(["frobnicate"]) == 2
    assert "demo, demo-vllm, up, status" in capsys.readouterr().err


@pytest.mark.parametrize("words", [w for w in all_commands() if w], ids=" ".join)
def test_an_unknown_option_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts tell a wrong call (2) from a failed one (1)."""
    assert main.run([*words, "--no-such-option"]) == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_an_unforeseen_failure_prints_one_line_and_debug_shows_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback in a user's face explains nothing to them; the developer can still have it."""

    @click.command()
    def broken() -> None:
        raise ZeroDivisionError("in the\nmiddle")

    monkeypatch.delenv(main.DEBUG_VARIABLE, raising=False)
    monkeypatch.setattr(LazyGroup, "get_command", lambda *_: broken)
    assert main.run(["version"]) == 1
    err = capsys.readouterr().err
    assert err == "turnout: ZeroDivisionError: in the middle (--debug shows where)\n"
    monkeypatch.setenv(main.DEBUG_VARIABLE, "1")
    with pytest.raises(ZeroDivisionError):
        main.run(["version"])


def test_a_failed_command_prints_its_details_below_the_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines of a process that died are what explains its end."""

    @click.command()
    def failing() -> None:
        raise CommandFailed("it failed", ["because", "of that"])

    monkeypatch.setattr(LazyGroup, "get_command", lambda *_: failing)
    assert main.run(["version"]) == 1
    assert capsys.readouterr().err == "turnout: it failed\n  because\n  of that\n"


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C has an exit code of its own that shells know."""

    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LazyGroup, "get_command", lambda *_: interrupted)
    assert main.run(["version"]) == 130
    assert capsys.readouterr().err.strip() == "turnout: interrupted"


def test_version_prints_what_is_installed() -> None:
    """The first thing a report of a fault needs."""
    done = turnout("version", "--json")
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert {"turnout", "turnout-services", "grpcio", "protobuf", "python", "journals"} == set(told)
    assert [journal.partition("/")[0] for journal in told["journals"]] == ["buffer", "engine", "scheduler"]


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (["--listen", "127.0.0.1:65536"], {}, "no valid port"),
        (["--listen", "0.0.0.0:0"], {}, "--insecure"),
        (["--time-scale", "fast"], {}, "time_scale"),
        ([], {"TURNOUT_BUFFER_LISSTEN": "127.0.0.1:0"}, "did you mean TURNOUT_BUFFER_LISTEN?"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    arguments: list[str], environment: dict[str, str], line: str
) -> None:
    """Whoever deploys a service must see which setting is wrong, at once and without a traceback."""
    done = turnout("buffer", "serve", *arguments, environment=environment)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert line in done.stderr
