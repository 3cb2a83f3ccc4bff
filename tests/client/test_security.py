"""TLS and the token on the side of the caller."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnout.client import ClientOptions, Security, SecurityError

SECRET = "turnout.worker.s3cret"


@pytest.mark.parametrize("target", ["node-7:50051", "10.0.0.1:50051", "dns:///node-7:50051", "[fd00::1]:50051"])
def test_a_token_is_not_sent_to_another_machine_in_the_open(target: str) -> None:
    """Whoever is on the way would read it, and be that worker from then on."""
    security = Security(token=SECRET)
    with pytest.raises(SecurityError, match="without TLS") as caught:
        security.credentials(target)
    assert SECRET not in str(caught.value)
    assert Security(token=SECRET, insecure=True).credentials(target) is None
    assert Security().credentials(target) is None


@pytest.mark.parametrize("target", ["127.0.0.1:50051", "localhost:50051", "[::1]:50051", "unix:/run/turnout.sock"])
def test_this_machine_needs_no_tls_for_a_token(target: str) -> None:
    """`turnout up` with tokens works before there is a certificate."""
    assert Security(token=SECRET).credentials(target) is None


def test_tls_counts_for_everything_but_unix_sockets(tmp_path: Path) -> None:
    """A target on loopback must not be the one that is believed without a certificate."""
    security = Security(ca="system", token=SECRET)
    assert security.is_tls("127.0.0.1:50051")
    assert security.is_tls("node-7:50051")
    assert not security.is_tls("unix:/run/turnout.sock")
    assert security.credentials("node-7:50051") is not None


def test_a_token_shows_in_no_repr(tmp_path: Path) -> None:
    """Options are logged, and tracebacks print them."""
    options = ClientOptions(security=Security(token=SECRET))
    assert "s3cret" not in repr(options)
    for bad in ("", "two words", "line\nbreak", "é"):
        with pytest.raises(SecurityError) as caught:
            Security(token=f"{bad} {SECRET}")
        assert "s3cret" not in str(caught.value)


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """A token that is renewed every hour must not need a worker to start again every hour."""
    path = tmp_path / "token"
    security = Security(token_file=path)
    with pytest.raises(SecurityError, match="cannot be read"):
        security.metadata()
    path.write_text(f"{SECRET}\n")
    assert security.metadata() == (("authorization", f"Bearer {SECRET}"),)
    path.write_text("turnout.worker.another\n")
    assert security.metadata() == (("authorization", "Bearer turnout.worker.another"),)
    path.unlink()
    assert security.metadata() == (("authorization", "Bearer turnout.worker.another"),)


def test_the_environment_says_it_for_programs_that_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's script is the same on a laptop and on a cluster."""
    values = {"CA": "/ca.pem", "CERT": "/c.pem", "KEY": "/c.key", "SERVER_NAME": "buffer", "TOKEN": SECRET}
    for name, value in values.items():
        monkeypatch.setenv(f"TURNOUT_{name}", value)
    monkeypatch.setenv("TURNOUT_TOKEN_FILE", "")
    security = ClientOptions().security
    assert security == Security(ca="/ca.pem", cert="/c.pem", key="/c.key", server_name="buffer", token=SECRET)
    assert not security.insecure
    monkeypatch.setenv("TURNOUT_INSECURE", "1")
    assert ClientOptions().security.insecure
    monkeypatch.delenv("TURNOUT_KEY")
    with pytest.raises(SecurityError, match="both"):
        ClientOptions()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """gRPC itself would say that the handshake failed."""
    with pytest.raises(SecurityError, match=r"ca\.pem cannot be read: No such file"):
        Security(ca=tmp_path / "ca.pem").credentials("node-7:1")
    with pytest.raises(SecurityError, match="not both"):
        Security(token=SECRET, token_file=tmp_path / "t")
