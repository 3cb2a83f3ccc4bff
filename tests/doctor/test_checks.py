"""Each check of `turnout doctor`, with the case it is there for."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.buffer.service import build as build_buffer
from services.buffer.settings import BufferSettings
from services.doctor import machine, targets
from services.doctor.certificates import check_authorities, check_pair
from services.doctor.finding import Finding, Verdict, ok, problem
from services.doctor.packages import check_shadowing, check_versions, installed
from services.doctor.replicas import check_replicas
from services.doctor.targets import FULL_NAMES, Answer, Place, check_place, judge
from services.doctor.tokens import check_token, check_tokens_file
from services.runtime.config import ServiceSettings
from services.runtime.tokens import make_token
from tests.client.real import real_buffer
from tests.runtime.certificates import Authority
from tests.runtime.helpers import probe_host
from tests.security.houses import Tokens
from turnout.channels import Security
from turnout.engine.v1 import engine_pb2

OWN = "0.1.0"
GOOD = {
    "turnout-services": "0.1.0",
    "turnout": "0.1.0",
    "grpcio": "1.80.0",
    "protobuf": "6.33.1",
    "grpcio-health-checking": "1.80.0",
    "grpcio-reflection": "1.71.2",
    "grpcio-channelz": "1.80.0",
    "grpcio-status": "1.80.0",
}
DAY_S = 86_400.0


def wrong(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is not Verdict.OK]


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = wrong(findings)
    assert finding.advice
    return finding


def test_a_finding_without_advice_is_no_finding() -> None:
    """Whoever runs this has a problem already, and does not know what to do."""
    with pytest.raises(ValueError, match="advice"):
        problem("disk", "x", "is full", "")
    assert ok("disk", "x", "fine").advice == ""


# ------------------------------------------------------------------------------------------------------------ packages


@pytest.mark.parametrize(
    ("change", "subject", "text"),
    [
        ({"grpcio": "1.62.1", "grpcio-health-checking": "1.62.1"}, "grpcio", "1.62.1 is older than 1.71.2"),
        ({"protobuf": "4.25.8"}, "protobuf", "4.25.8 is older than 5.29.6"),
        ({"protobuf": "5.29.5rc1"}, "protobuf", "5.29.5rc1 is older than 5.29.6"),
        ({"grpcio-status": "1.81.0"}, "grpcio-status", "1.81.0 is newer than grpcio 1.80.0"),
        ({"turnout": "0.0.9"}, "turnout", "turnout-services 0.1.0, turnout 0.0.9"),
        ({"grpcio-reflection": None}, "grpcio-reflection", "not installed"),
    ],
)
def test_versions_that_do_not_fit_together(change: dict[str, str | None], subject: str, text: str) -> None:
    """An image that pins one of them for another package makes an error deep in an import, or at the first call."""
    found = {name: version for name, version in {**GOOD, **change}.items() if version is not None}
    # An old grpcio also has helpers that are newer than it.
    findings = {finding.subject: finding.text for finding in wrong(check_versions(found))}
    assert findings[subject] == text
    assert wrong(check_versions(GOOD)) == []


def test_what_is_installed_here_fits() -> None:
    """The floors are those of what the tests run with."""
    assert wrong(check_versions(installed())) == []


def test_a_services_folder_of_the_users_own_is_named(tmp_path: Path) -> None:
    """`services` is a common name: a user's folder of that name must not be imported in Turnout's place, unnoticed."""
    own = tmp_path / "site-packages" / "services"
    project = tmp_path / "project"
    for package in (own, project / "services"):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    on_path = only(check_shadowing(own, f"{tmp_path / 'other'}{os.pathsep}{project}", tmp_path))
    assert on_path.verdict is Verdict.PROBLEM
    assert str(project / "services") in on_path.text
    here = only(check_shadowing(own, "", project))
    assert here.verdict is Verdict.WARNING
    assert "-P" in here.advice
    # Turnout's own source tree is no stranger.
    assert wrong(check_shadowing(own, str(own.parent), own.parent)) == []


# ------------------------------------------------------------------------------------------------------------- machine


def test_too_few_file_descriptors() -> None:
    """At 1024, a few hundred workers end with EMFILE in the middle of the night."""
    finding = machine.check_files(1024)
    assert finding.verdict is Verdict.PROBLEM
    assert "LimitNOFILE" in finding.advice
    assert machine.check_files(1 << 20).verdict is Verdict.OK


def test_a_data_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """The service would find out at its start, on the node where nobody looks."""
    (tmp_path / "file").touch()
    assert only(machine.check_data_dir(tmp_path / "file" / "data")).verdict is Verdict.PROBLEM


def test_a_data_directory_that_belongs_to_another_user(tmp_path: Path) -> None:
    """A service's own directory is closed to the person who runs the command, and that ended it with a traceback."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        finding = only(machine.check_data_dir(closed / "data" / "buffer"))
    finally:
        if root:
            os.seteuid(0)
    assert finding.verdict is Verdict.PROBLEM


def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100 MB left the buffer refuses payloads within minutes."""
    usage = SimpleNamespace(total=1 << 40, free=100 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    findings = [finding for finding in machine.check_data_dir(tmp_path) if finding.check == "disk"]
    assert only(findings).verdict is Verdict.PROBLEM
    usage.free = 20 << 30
    assert [finding.verdict for finding in machine.check_data_dir(tmp_path) if finding.check == "disk"] == [
        Verdict.WARNING
    ]


def test_a_data_directory_on_a_network_file_system(tmp_path: Path) -> None:
    """SQLite's write-ahead log shares memory between connections, which NFS does not offer: journals get damaged."""
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/home {tmp_path} nfs4 rw 0 0\n"
    findings = [finding for finding in machine.check_data_dir(tmp_path / "data", mounts) if "is on" in finding.text]
    assert only(findings).text == "is on nfs4"
    assert [one for one in machine.check_data_dir(tmp_path, "/dev/sda1 / ext4 rw 0 0\n") if "is on" in one.text] == []


def test_a_slow_fsync(tmp_path: Path) -> None:
    """Every answer of a service with durability fsync waits for it."""
    assert machine.judge_fsync("d", 0.5).verdict is Verdict.PROBLEM
    assert machine.judge_fsync("d", 0.05).verdict is Verdict.WARNING
    assert machine.judge_fsync("d", 0.002).verdict is Verdict.OK
    assert machine.fsync_seconds(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- certificates


def test_certificates_that_expired_expire_soon_or_belong_to_another_key(tmp_path: Path) -> None:
    """A cluster that stops at midnight because of a date in a file is the one outage that could have been foreseen."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("server", "trainer-node")
    now = time.time()
    good = check_pair(cert, key, now)
    assert good.verdict is Verdict.OK
    assert good.text.startswith("trainer-node is valid for ")
    days = int(good.text.rpartition(" for ")[2].split()[0])
    soon = check_pair(cert, key, now + (days - 3) * DAY_S)
    assert soon.verdict is Verdict.WARNING
    assert "expires in" in soon.text
    late = check_pair(cert, key, now + (days + 2) * DAY_S)
    assert late.verdict is Verdict.PROBLEM
    assert "expired" in late.text
    _, other = authority.issue("other", "worker-node")
    assert check_pair(cert, other, now).verdict is Verdict.PROBLEM
    assert check_pair(tmp_path / "nowhere.pem", key, now).verdict is Verdict.PROBLEM
    secret = key.read_text().splitlines()[2]
    assert secret not in "".join(str(check_pair(*pair, now)) for pair in ((cert, key), (cert, other), (key, key)))


def test_authorities_that_expired_or_are_none(tmp_path: Path) -> None:
    """Behind an expired authority every certificate is worth nothing."""
    authority = Authority(tmp_path)
    now = time.time()
    assert [finding.verdict for finding in check_authorities(authority.ca, now)] == [Verdict.OK]
    assert only(check_authorities(authority.ca, now + 2000 * 365 * DAY_S)).verdict is Verdict.PROBLEM
    empty = tmp_path / "empty.pem"
    empty.touch()
    assert only(check_authorities(empty, now)).verdict is Verdict.PROBLEM


# -------------------------------------------------------------------------------------------------------------- tokens


def test_files_of_tokens_that_let_nobody_in_or_everybody(tmp_path: Path) -> None:
    """An unreadable one ended the command with an error, and one that others may write to is no protection."""
    path = Tokens(tmp_path / "tokens.yaml").write()
    path.chmod(0o640)
    assert check_tokens_file(path).verdict is Verdict.OK
    path.chmod(0o660)
    assert only([check_tokens_file(path)]).advice == f"chmod go-w {path}"
    path.write_text("- {id: x}")
    assert "tokens.yaml" not in only([check_tokens_file(path)]).text
    assert "No such file" in only([check_tokens_file(tmp_path / "none.yaml")]).text


@pytest.mark.parametrize(
    ("content", "text"),
    [("", "empty"), ("two words", "characters"), ("some-password", "no token of Turnout"), (None, "No such file")],
)
def test_a_token_that_cannot_be_shown(tmp_path: Path, content: str | None, text: str) -> None:
    """What it says stays out of the answer."""
    path = tmp_path / "worker.token"
    if content is not None:
        path.write_text(content)
    finding = only(check_token(str(path), Security(token_file=path)))
    assert text in finding.text
    assert not content or content not in finding.text


def test_a_token_that_everybody_on_the_machine_may_read(tmp_path: Path) -> None:
    """Made without the umask of the docs, it is good for whoever logs in."""
    path = tmp_path / "worker.token"
    path.write_text(make_token("worker", "x" * 43))
    path.chmod(0o644)
    assert only(check_token(str(path), Security(token_file=path))).verdict is Verdict.WARNING
    path.chmod(0o600)
    assert wrong(check_token(str(path), Security(token_file=path))) == []
    assert list(check_token("none", Security())) == []


# ------------------------------------------------------------------------------------------------------------- targets


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def look(place: Place, environ: dict[str, str] | None = None) -> list[Finding]:
    return await check_place(place, environ or {}, OWN)


async def test_a_port_that_nobody_listens_on() -> None:
    """Free is fine before anything runs, and a problem where a service was named."""
    target = f"127.0.0.1:{_free_port()}"
    assert [finding.text for finding in await look(Place("buffer", target, expected=False))] == ["free"]
    finding = only(await look(Place("buffer", target, expected=True)))
    assert finding.text == "nobody listens"
    assert f"--listen {target}" in finding.advice


async def test_a_port_that_something_else_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """`address in use` says neither by whom nor what to do."""
    monkeypatch.setattr(targets, "ASK_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        # It takes connections and stays silent, as many a server does that waits for a request of its own kind.
        port = server.getsockname()[1]
        finding = only(await look(Place("buffer", f"127.0.0.1:{port}", expected=False)))
    assert "none of ours" in finding.text
    assert f"sport = :{port}" in finding.advice


async def test_another_service_of_ours_at_the_target() -> None:
    """Two targets that were mixed up make UNIMPLEMENTED in the middle of a training script."""
    async with real_buffer() as host:
        assert wrong(await look(Place("buffer", host.target, expected=True))) == []
        finding = only(await look(Place("engine", host.target, expected=True)))
    assert finding.text == "the buffer answers there"


async def test_a_grpc_server_of_another_kind() -> None:
    """Something answers gRPC there, with health even, and knows none of our calls."""
    async with probe_host(settings=ServiceSettings(grace_s=1)) as host:
        finding = only(await look(Place("scheduler", host.target, expected=True)))
    assert finding.text == "a gRPC server of another kind answers"


async def _trouble(service: dict[str, Path], monkeypatch: pytest.MonkeyPatch, **caller: object) -> Finding:
    """What is told about a buffer with these settings to somebody with these TURNOUT_* variables."""
    for name, value in caller.items():
        monkeypatch.setenv(f"TURNOUT_{name.upper()}", str(value))
    settings = BufferSettings.model_validate({"listen": ["127.0.0.1:0"], "grace_s": 1, **service})
    async with build_buffer(settings) as host:
        found = wrong(await look(Place("buffer", host.target, expected=True)))
    for name in caller:
        monkeypatch.delenv(f"TURNOUT_{name.upper()}")
    (finding,) = found or [ok("port", "", "")]
    return finding


async def test_each_way_in_which_tls_fails_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC says UNAVAILABLE for all of them, and an operator tries the other flag."""
    authority, other = Authority(tmp_path / "own"), Authority(tmp_path / "other")
    cert, key = authority.issue("server", "127.0.0.1")
    tls = {"tls_cert": cert, "tls_key": key}
    plain = await _trouble(tls, monkeypatch)
    assert plain.text == "it speaks TLS, and was asked without"
    assert "--ca" in plain.advice
    stranger = await _trouble(tls, monkeypatch, ca=other.ca)
    assert stranger.text.startswith("its certificate is refused: ")
    assert "authority that signed it" in stranger.advice
    name = await _trouble(tls, monkeypatch, ca=authority.ca, server_name="trainer-0")
    assert "trainer-0" in name.text
    assert "--server-name" in name.advice
    open_port = await _trouble({}, monkeypatch, ca=authority.ca)
    assert open_port.text == "it does not speak TLS, and was asked to"
    mutual = {**tls, "tls_client_ca": authority.ca}
    nobody = await _trouble(mutual, monkeypatch, ca=authority.ca)
    assert "wants a certificate" in nobody.text
    assert "--cert and --key" in nobody.advice
    cert, key = other.issue("worker", "worker-0")
    wrong_one = await _trouble(mutual, monkeypatch, ca=authority.ca, cert=cert, key=key)
    assert "refuses our certificate" in wrong_one.text
    cert, key = authority.issue("worker", "worker-0")
    assert (await _trouble(mutual, monkeypatch, ca=authority.ca, cert=cert, key=key)).verdict is Verdict.OK


async def test_a_certificate_that_ran_out_at_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files on this machine are good: it is the other one's that has to be renewed."""
    authority = Authority(tmp_path)
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    cert, key = authority.issue("server", "127.0.0.1", not_after=past)
    finding = await _trouble({"tls_cert": cert, "tls_key": key}, monkeypatch, ca=authority.ca)
    assert finding.text == "its certificate is refused: certificate has expired"
    assert finding.advice.startswith("renew it there")


@pytest.mark.parametrize("target", ["localhost", "", "node:99999", "http://node:50051"])
async def test_what_is_no_target_is_called_that(target: str) -> None:
    """Something was said to listen on port `localhost`, with advice to look for it by `ss`."""
    assert only(await look(Place("", target, expected=True))).text.startswith("is no target: ")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "two..dots"])
async def test_a_host_that_does_not_resolve(host: str) -> None:
    """A name that only some nodes know looks like a service that is down; one that is no name ended the command."""
    finding = only(await look(Place("buffer", f"{host}:50051", expected=True)))
    assert "cannot be reached" in finding.text
    assert "getent" in finding.advice


async def test_h55_a_proxy_in_the_way_is_named() -> None:
    """Clusters set http_proxy for package downloads; gRPC then sends its calls there, and they fail as UNAVAILABLE."""
    environ = {"http_proxy": "http://user:secret@proxy.example:3128"}
    findings = await look(Place("scheduler", "trainer-node.invalid:50053", expected=True), environ)
    (proxy,) = (finding for finding in findings if finding.check == "proxy")
    assert proxy.verdict is Verdict.PROBLEM
    assert "http_proxy=http://proxy.example:3128" in proxy.text
    assert "secret" not in str(findings)
    assert "no_proxy" in proxy.advice
    local = await look(Place("scheduler", f"127.0.0.1:{_free_port()}", expected=False), environ)
    assert wrong(local) == []


def _judged(**changes: object) -> list[Finding]:
    values: dict[str, object] = {
        "serving": True,
        "version": OWN,
        "skew_s": 0.0,
        "names": frozenset({FULL_NAMES["buffer"]}),
        **changes,
    }
    return wrong(judge(Place("buffer", "node:50051", expected=True), Answer(**values), OWN))  # type: ignore[arg-type]


def test_a_clock_that_is_off() -> None:
    """Events of two services cannot be put in order, and certificates are not valid yet, or not any more."""
    assert only(_judged(skew_s=-7.25)).text == "is 7.2 s behind ours"
    assert only(_judged(skew_s=30.0)).text == "is 30.0 s ahead of ours"
    assert _judged(skew_s=0.4) == []
    assert _judged(skew_s=None) == []


def test_a_service_that_does_not_serve_or_is_of_another_version() -> None:
    """Half an upgrade works until a call is made that one side does not know."""
    assert only(_judged(serving=False)).check == "health"
    older = only(_judged(version="0.0.9"))
    assert older.verdict is Verdict.WARNING
    assert older.text == f"is version 0.0.9, this command {OWN}"


async def test_a_real_service_tells_its_version_and_clock() -> None:
    """The metadata that the two checks above rest on are there."""
    async with real_buffer() as host:
        checks = {finding.check for finding in await look(Place("buffer", host.target, expected=True))}
    assert {"health", "clock"} <= checks


# -------------------------------------------------------------------------------------------------------------- engines


def _replica(**fields: object) -> engine_pb2.Replica:
    flags = fields.pop("flags", None)
    spec = engine_pb2.ReplicaSpec(
        replica_id="h0",
        role=engine_pb2.REPLICA_ROLE_HYBRID,
        backend="vllm-http",
        endpoint="http://node:8000",
        flags=flags,  # type: ignore[arg-type]
    )
    values = {"health": engine_pb2.REPLICA_HEALTH_HEALTHY, "capabilities": ["sleep", "wake_tags"], **fields}
    return engine_pb2.Replica(spec=spec, **values)  # type: ignore[arg-type]


def test_engines_that_cannot_do_what_their_role_asks() -> None:
    """A hybrid engine without sleep mode is found out at the first reclaim, with the trainer waiting for its memory."""
    assert wrong(check_replicas("r", [_replica()])) == []
    asleep = only(check_replicas("r", [_replica(capabilities=["pause_keep"])]))
    assert asleep.text == "is hybrid and cannot sleep"
    assert "sleep mode" in asleep.advice
    keeps = _replica(capabilities=["pause_keep"], flags=engine_pb2.ReplicaFlags(free_cache_engine=False))
    assert wrong(check_replicas("r", [keeps])) == []
    dead = only(check_replicas("r", [_replica(health=engine_pb2.REPLICA_HEALTH_DEAD, reason="it exited")]))
    assert dead.text == "is dead: it exited"
    assert "http://node:8000" in dead.advice
