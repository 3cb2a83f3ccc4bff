"""TLS of a hosted service: who is let in, and what happens when files change."""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from services.runtime.config import ServiceSettings
from services.runtime.host import StartError
from services.runtime.tls import ServerTls, TlsError
from tests.runtime.certificates import Authority
from tests.runtime.helpers import Caller, probe_host
from turnout.channels import Security, connect


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def _settings(authority: Authority, *, mutual: bool = False, **more: Any) -> ServiceSettings:
    cert, key = authority.issue("server", "127.0.0.1", "localhost")
    return ServiceSettings(
        tls_cert=cert, tls_key=key, tls_client_ca=authority.ca if mutual else None, grace_s=1, **more
    )


async def _call(target: str, security: Security) -> str:
    async with connect(target, [("grpc.use_local_subchannel_pool", 1)], security) as channel:
        return str((await Caller(channel).unary("x")).value)


async def _refused(target: str, security: Security) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _call(target, security)
    return caught.value.code()


async def test_callers_that_trust_the_authority_are_served_and_others_are_not(
    authority: Authority, tmp_path: Path
) -> None:
    """A certificate that nobody checks protects from nobody; plain text must not be served beside it."""
    stranger = Authority(tmp_path / "stranger")
    async with probe_host(settings=_settings(authority)) as host:
        assert await _call(host.target, Security(ca=authority.ca)) == "x"
        assert await _refused(host.target, Security(ca=stranger.ca)) is grpc.StatusCode.UNAVAILABLE
        assert await _refused(host.target, Security()) is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_lets_nobody_in_without_a_certificate_of_the_authority(
    authority: Authority, tmp_path: Path
) -> None:
    """A certificate of another authority, which anyone can make, must not do."""
    stranger = Authority(tmp_path / "stranger")
    async with probe_host(settings=_settings(authority, mutual=True)) as host:
        for maker, served in ((authority, True), (stranger, False)):
            cert, key = maker.issue("client", "worker-7")
            security = Security(ca=authority.ca, cert=cert, key=key)
            if served:
                assert await _call(host.target, security) == "x"
            else:
                assert await _refused(host.target, security) is grpc.StatusCode.UNAVAILABLE
        assert await _refused(host.target, Security(ca=authority.ca)) is grpc.StatusCode.UNAVAILABLE


async def test_a_name_that_the_certificate_does_not_bear_can_be_expected_instead(tmp_path: Path) -> None:
    """A service behind an address that changes has a certificate for its name."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("server", "buffer.turnout.internal")
    settings = ServiceSettings(tls_cert=cert, tls_key=key, grace_s=1)
    async with probe_host(settings=settings) as host:
        assert await _refused(host.target, Security(ca=authority.ca)) is grpc.StatusCode.UNAVAILABLE
        named = Security(ca=authority.ca, server_name="buffer.turnout.internal")
        assert await _call(host.target, named) == "x"


async def test_a_unix_socket_stays_plain(authority: Authority, tmp_path: Path) -> None:
    """No name of a certificate fits a path; the permissions of the socket protect it."""
    path = f"unix:{tmp_path}/s.sock"
    async with probe_host(settings=_settings(authority, listen=[path])) as host:
        assert await _call(host.target, Security(ca=authority.ca)) == "x"


def _serial(target: str, ca: Path) -> int:
    host, _, port = target.rpartition(":")
    pem = ssl.get_server_certificate((host, int(port)), ca_certs=str(ca))
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


async def test_a_renewed_certificate_is_shown_to_the_next_connection(authority: Authority) -> None:
    """Certificates that live for a day would otherwise need a restart a day."""
    settings = _settings(authority, metrics_listen="127.0.0.1:0")
    async with probe_host(settings=settings) as host:
        metrics = (host.metrics_url or "").removeprefix("https://").partition("/")[0]
        before = [await asyncio.to_thread(_serial, place, authority.ca) for place in (host.target, metrics)]
        async with connect(host.target, [], Security(ca=authority.ca)) as open_since:
            await Caller(open_since).unary("x")
            authority.issue("server", "127.0.0.1", "localhost")
            after = [await asyncio.to_thread(_serial, place, authority.ca) for place in (host.target, metrics)]
            assert not set(before) & set(after)
            assert after[0] == after[1]
            assert await _call(host.target, Security(ca=authority.ca)) == "x"
            assert (await Caller(open_since).unary("y")).value == "y"


async def test_a_half_renewed_pair_leaves_the_last_one_in_force(authority: Authority) -> None:
    """A connection that arrives between the two writes must not take the service down."""
    settings = _settings(authority)
    assert settings.tls_cert is not None
    async with probe_host(settings=settings) as host:
        good = settings.tls_cert.read_bytes()
        settings.tls_cert.write_bytes(good[: len(good) // 2])
        assert await _call(host.target, Security(ca=authority.ca)) == "x"
        settings.tls_cert.unlink()
        assert await _call(host.target, Security(ca=authority.ca)) == "x"


async def test_metrics_are_served_over_tls_to_those_with_a_certificate(authority: Authority) -> None:
    """They name runs and models, and would be the one open door of a closed house."""
    async with probe_host(settings=_settings(authority, mutual=True, metrics_listen="127.0.0.1:0")) as host:
        url = host.metrics_url or ""

        def get(context: ssl.SSLContext) -> bytes:
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
            )
            with opener.open(url, timeout=10) as answer:
                return bytes(answer.read())

        context = ssl.create_default_context(cafile=str(authority.ca))
        with pytest.raises(OSError, match=r"(?i)certificate|eof|reset|closed"):
            await asyncio.to_thread(get, context)
        context.load_cert_chain(*authority.issue("prometheus", "prometheus"))
        assert b"turnout_event_loop_lag_seconds" in await asyncio.to_thread(get, context)


def test_files_that_do_not_fit_together_are_told_at_the_start(authority: Authority) -> None:
    """A wrong key would otherwise show as connections that fail, one by one, at night."""
    cert, key = authority.issue("server", "localhost")
    _, other_key = authority.issue("other", "localhost")
    with pytest.raises(TlsError, match="no certificate with its key"):
        ServerTls(cert, other_key, None)
    with pytest.raises(TlsError, match="cannot be read"):
        ServerTls(cert, key.with_name("none.key"), None)
    with pytest.raises(TlsError, match="holds no certificates"):
        ServerTls(cert, key, key)


async def test_a_service_with_wrong_files_does_not_start(authority: Authority, tmp_path: Path) -> None:
    """It would listen, and answer nobody."""
    cert, _ = authority.issue("server", "localhost")
    settings = ServiceSettings(tls_cert=cert, tls_key=tmp_path / "none.key")
    with pytest.raises(StartError, match=r"none\.key cannot be read"):
        await probe_host(settings=settings).start()
