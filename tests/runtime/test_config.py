"""Where settings come from, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, Field, SecretStr

from services.runtime.config import ConfigError, ServiceSettings, Strings, load_settings, settings_config
from services.runtime.options import settings_command


class Retry(BaseModel, extra="forbid"):
    """A nested part of the settings."""

    max_attempts: int = Field(3, ge=1, description="Attempts in total.")


class ProbeSettings(ServiceSettings):
    """Settings as a service declares them."""

    model_config = settings_config("probe")

    listen: Strings = Field(["127.0.0.1:50099"], description="Where to listen.")
    lease_s: float = Field(30.0, gt=0, description="Seconds a lease lasts.")
    token: SecretStr | None = Field(None, min_length=8, description="What callers must show.")
    retry: Retry = Retry()


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "turnout.yaml"


def _problems(**sources: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(ProbeSettings, **sources)  # type: ignore[arg-type]
    assert not any("\n" in problem for problem in caught.value.problems)
    return caught.value.problems


def test_flags_win_over_environment_over_file_over_defaults(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value set for one start must not be overruled by what lies on the machine."""
    config_file.write_text("lease_s: 1\ngrace_s: 1\ntime_scale: 1\nretry: {max_attempts: 4}\n")
    monkeypatch.setenv("TURNOUT_PROBE_GRACE_S", "2")
    monkeypatch.setenv("TURNOUT_PROBE_TIME_SCALE", "2")
    settings = load_settings(ProbeSettings, flags={"time_scale": "3"}, config=config_file)
    assert (settings.keepalive_s, settings.lease_s, settings.grace_s, settings.time_scale) == (10.0, 1, 2, 3)
    assert settings.retry.max_attempts == 4


def test_nested_values_merge_and_lists_are_separated_by_commas(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment cannot hold structure; names and commas carry it."""
    config_file.write_text("listen: ['127.0.0.1:1']\n")
    monkeypatch.setenv("TURNOUT_CONFIG", str(config_file))
    assert load_settings(ProbeSettings).listen == ["127.0.0.1:1"]
    monkeypatch.setenv("TURNOUT_PROBE_LISTEN", "127.0.0.1:2, [::1]:3")
    monkeypatch.setenv("TURNOUT_PROBE_RETRY__MAX_ATTEMPTS", "7")
    settings = load_settings(ProbeSettings)
    assert settings.listen == ["127.0.0.1:2", "[::1]:3"]
    assert settings.retry.max_attempts == 7


def test_building_a_model_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test or an embedder gets what it asked for on every machine."""
    monkeypatch.setenv("TURNOUT_PROBE_LEASE_S", "5")
    assert ProbeSettings().lease_s == 30.0


def test_unknown_keys_are_named_wherever_they_stand(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt setting that is passed over leaves its default in force, unseen."""
    config_file.write_text("leese_s: 1\nretry: {max_attemps: 2}\n")
    monkeypatch.setenv("TURNOUT_PROBE_LEASE", "5")
    problems = "\n".join(_problems(config=config_file))
    assert "unknown setting leese_s (did you mean lease_s?)" in problems
    assert "unknown setting retry.max_attemps (did you mean max_attempts?)" in problems
    assert "unknown variable TURNOUT_PROBE_LEASE (did you mean TURNOUT_PROBE_LEASE_S?)" in problems
    monkeypatch.delenv("TURNOUT_PROBE_LEASE")
    assert _problems(flags={"bogus": 1}) == ["bogus: extra inputs are not permitted (given: 1)"]


def test_every_wrong_value_is_reported_at_once(config_file: Path) -> None:
    """One problem for each start would make a user start five times."""
    config_file.write_text("lease_s: .nan\ngrace_s: soon\nretry: {max_attempts: 0}\ntime_scale: 0\n")
    problems = _problems(config=config_file)
    assert [problem.partition(":")[0] for problem in problems] == [
        "grace_s",
        "time_scale",
        "lease_s",
        "retry.max_attempts",
    ]


def test_secrets_are_never_repeated() -> None:
    """A configuration error ends up in logs and in tickets."""
    (problem,) = _problems(flags={"token": "hunter2"})
    assert problem.startswith("token: ")
    assert "hunter2" not in problem
    assert "hunter2hunter2" not in repr(ProbeSettings(token=SecretStr("hunter2hunter2")))


@pytest.mark.parametrize(
    ("content", "why"),
    [("- a\n", "settings by name"), ("a: [\n", "not valid YAML"), (None, "cannot be read")],
)
def test_an_unusable_file_is_one_problem(config_file: Path, content: str | None, why: str) -> None:
    """The parser's own text has many lines and no file name."""
    if content is not None:
        config_file.write_text(content)
    (problem,) = _problems(config=config_file)
    assert why in problem
    assert str(config_file) in problem


def test_an_empty_file_sets_nothing(config_file: Path) -> None:
    """A file of comments alone is valid YAML for "nothing"."""
    config_file.write_text("# nothing yet\n")
    assert load_settings(ProbeSettings, config=config_file) == ProbeSettings()


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "node:1"])
def test_other_machines_are_let_in_only_on_purpose(address: str) -> None:
    """A service that moves GPUs must not be open to a network because of a habit."""
    (problem,) = _problems(flags={"listen": [address]})
    assert "--insecure" in problem
    (problem,) = _problems(flags={"metrics_listen": address})
    assert "--insecure" in problem
    assert load_settings(ProbeSettings, flags={"listen": [address], "insecure": True}).listen == [address]


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "::1", "127.0.0.1:-1"])
def test_h56_wrong_addresses_are_configuration_errors(address: str) -> None:
    """They are known before anything is started."""
    (problem,) = _problems(flags={"listen": [address]})
    assert problem.startswith("listen: ")
    assert _problems(flags={"metrics_listen": "unix:/x"}) == [
        "metrics_listen: 'unix:/x' is a Unix socket, metrics need HOST:PORT"
    ]


def _command(seen: list[ProbeSettings]) -> click.Command:
    @settings_command(ProbeSettings, name="serve", help="Serve a probe.")
    def serve(settings: ProbeSettings) -> int:
        seen.append(settings)
        return 7

    return serve


def test_a_command_takes_every_field_as_an_option() -> None:
    """The command line and the model cannot drift apart."""
    seen: list[ProbeSettings] = []
    arguments = "--listen 127.0.0.1:1 --listen 127.0.0.1:2 --lease-s 2 --retry-max-attempts 5 --insecure"
    result = CliRunner().invoke(_command(seen), arguments.split())
    assert (result.exit_code, result.output) == (7, "")
    assert seen == [
        ProbeSettings(listen=["127.0.0.1:1", "127.0.0.1:2"], lease_s=2, retry=Retry(max_attempts=5), insecure=True)
    ]


def test_help_teaches_from_the_model() -> None:
    """Meaning, default and variable of each setting stand in one place."""
    text = " ".join(CliRunner().invoke(_command([]), ["--help"], terminal_width=400).output.split())
    assert "--lease-s NUMBER Seconds a lease lasts. [default: 30.0; env: TURNOUT_PROBE_LEASE_S]" in text
    assert (
        "--retry-max-attempts INTEGER Attempts in total. [default: 3; env: TURNOUT_PROBE_RETRY__MAX_ATTEMPTS]" in text
    )
    assert "--insecure / --no-insecure" in text
    assert "debug|info|warning|error" in text


def test_a_wrong_configuration_ends_with_lines_and_code_2() -> None:
    """Scripts tell a wrong start from a failed one by the code; people need no traceback."""
    result = CliRunner().invoke(_command([]), ["--lease-s", "nan", "--retry-max-attempts", "x"])
    assert result.exit_code == 2
    assert [line.split(":")[:2] for line in result.output.splitlines()] == [
        ["configuration", " lease_s"],
        ["configuration", " retry.max_attempts"],
    ]


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({}, False),
        ({"tls_cert": "c", "tls_key": "k"}, False),
        ({"tokens_file": "t"}, False),
        ({"tls_cert": "c", "tls_key": "k", "tokens_file": "t"}, True),
        ({"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}, True),
        ({"insecure": True}, True),
    ],
)
def test_other_machines_are_served_over_tls_and_with_tokens_or_certificates(
    given: dict[str, object], accepted: bool
) -> None:
    """TLS alone lets in everyone who trusts the server; tokens alone can be read on the way."""
    flags = {"listen": ["0.0.0.0:1"], **given}
    if accepted:
        assert load_settings(ProbeSettings, flags=flags).listen == ["0.0.0.0:1"]
    else:
        assert "other machines" in _problems(flags=flags)[0]


def test_metrics_for_other_machines_need_client_certificates() -> None:
    """Prometheus shows no token of ours, and run names are nobody else's business."""
    flags = {"metrics_listen": "0.0.0.0:1", "tls_cert": "c", "tls_key": "k", "tokens_file": "t"}
    assert "tls_client_ca" in _problems(flags=flags)[0]
    assert load_settings(ProbeSettings, flags={**flags, "tls_client_ca": "a"}).metrics_listen == "0.0.0.0:1"


@pytest.mark.parametrize("given", [{"tls_cert": "c"}, {"tls_key": "k"}, {"tls_client_ca": "a"}])
def test_half_of_tls_is_an_error(given: dict[str, str]) -> None:
    """It would be served in the open, and look as if it were not."""
    assert "tls_" in _problems(flags=given)[0]
