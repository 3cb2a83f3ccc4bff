"""Tokens and the file that says what each may do."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.token import token as command
from services.runtime.permissions import Role
from services.runtime.tokens import Token, TokenFile, TokensError, digest, make_token, read_tokens


def _line(token: str, role: str = "worker", scope: str = "run: r1") -> str:
    return f"- {{id: {token.split('.')[1]}, role: {role}, {scope}, sha256: '{digest(token).hex()}'}}\n"


FIRST, SECOND = make_token("a", "x" * 43), make_token("b", "y" * 43)


def test_what_the_command_prints_is_what_a_service_accepts(tmp_path: Path) -> None:
    """A line that has to be edited by hand is edited wrongly."""
    path = tmp_path / "tokens.yaml"
    made = []
    for arguments in (["--role", "worker", "--run", "a: b"], ["--role", "operator", "--all-runs", "--id", "root"]):
        result = CliRunner().invoke(command, ["new", *arguments])
        assert result.exit_code == 0
        made.append(result.stdout.strip())
        assert made[-1] not in result.stderr
        with path.open("a") as file:
            file.write(result.stderr)
    tokens = TokenFile(path)
    found = [tokens.find(text) for text in made]
    assert [(known.role, known.run) for known in found if known] == [(Role.WORKER, "a: b"), (Role.OPERATOR, None)]
    assert found[1] is not None
    assert found[1].id == "root"


@pytest.mark.parametrize("arguments", [[], ["--run", "r", "--all-runs"], ["--all-runs", "--id", "a.b"]])
def test_a_token_without_a_clear_scope_is_not_made(arguments: list[str]) -> None:
    """A forgotten --run must not become a token for everything."""
    result = CliRunner().invoke(command, ["new", "--role", "worker", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")


def test_only_the_whole_token_is_found(tmp_path: Path) -> None:
    """An id, a prefix or another token's secret must open nothing."""
    path = tmp_path / "tokens.yaml"
    path.write_text(_line(FIRST) + _line(SECOND))
    tokens = TokenFile(path)
    assert tokens.find(FIRST) == Token("a", Role.WORKER, "r1", digest(FIRST))
    wrong = ["", ".", "turnout", "turnout.a", "turnout.a.", FIRST[:-1], FIRST + "x", FIRST.replace(".a.", ".b.")]
    wrong += [FIRST.upper(), FIRST + "\0", "turnout." + "a" * 5000, digest(FIRST).hex(), "\udcff"]
    assert [text for text in wrong if tokens.find(text) is not None] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "list"),
        ("[]", "at least 1 item"),
        ("tokens: []", "list"),
        ("- {id: a", "not valid YAML"),
        (_line(FIRST) + _line(FIRST), "twice"),
        (_line(FIRST, role="king"), "role"),
        (_line(FIRST, scope="run: r1, all_runs: true"), "either run"),
        (_line(FIRST, scope="all_runs: false"), "either run"),
        (_line(FIRST, scope="run: ''"), "run"),
        (_line(FIRST, scope="run: r1, expires: never"), "expires"),
        (f"- {{id: a, role: worker, run: r1, sha256: '{FIRST}'}}", "sha256"),
    ],
)
def test_a_wrong_file_is_refused_without_repeating_it(text: str, problem: str) -> None:
    """Whoever pastes the token in place of its hash must not find it in the log."""
    with pytest.raises(TokensError, match=problem) as caught:
        read_tokens(text, "tokens.yaml")
    assert FIRST not in str(caught.value)
    assert digest(FIRST).hex() not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_that_would_run_code_is_refused() -> None:
    """A tokens file is data."""
    with pytest.raises(TokensError, match="not valid YAML"):
        read_tokens("- !!python/object/apply:os.system ['true']", "tokens.yaml")


def test_a_change_counts_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    """A slip of the pen while adding a worker must not lock the trainer out."""
    path = tmp_path / "tokens.yaml"
    path.write_text(_line(FIRST))
    tokens = TokenFile(path)
    first = tokens.find(FIRST)
    assert first is not None
    assert not tokens.refresh()
    path.write_text(_line(FIRST) + _line(SECOND))
    assert tokens.refresh()
    assert tokens.find(SECOND) is not None
    for wrong in ("nonsense", ""):
        path.write_text(wrong)
        assert not tokens.refresh()
        assert tokens.find(FIRST) == first
    path.unlink()
    assert not tokens.refresh()
    path.write_text(_line(SECOND))
    assert tokens.refresh()
    assert tokens.find(FIRST) is None
    assert not tokens.holds(first)
