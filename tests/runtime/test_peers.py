"""The way from a service to the services it calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.runtime.errors import Code, TurnoutError
from services.runtime.peers import Dialer, peer_options
from tests.runtime.certificates import Authority
from turnout.channels import SYSTEM, Security


def test_a_quiet_watch_is_pinged_for_as_long_as_it_is_open() -> None:
    """By default gRPC stops after two pings without data, and a peer whose machine is gone is followed for hours."""
    options = dict(peer_options("node-7:5"))
    assert options["grpc.http2.max_pings_without_data"] == 0
    assert int(options["grpc.keepalive_time_ms"]) + int(options["grpc.http2.ping_timeout_ms"]) <= 15_000


def test_a_target_that_a_token_may_not_travel_to_is_refused_by_name() -> None:
    """A trainer names the peers: a typo of it must not send the scheduler's token in the open, nor crash a run."""
    with pytest.raises(TurnoutError) as caught:
        Dialer(Security(token="turnout.s.x"), ("node-7:50051",)).open("node-7:50051")
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "PEER_SECURITY")
    assert caught.value.metadata == {"target": "node-7:50051"}
    assert "turnout.s.x" not in str(caught.value)


OWN = "ca.pem"


@pytest.mark.parametrize(
    ("security", "allowed", "target", "called"),
    [
        (Security(token="t"), (), "127.0.0.1:5", True),
        (Security(token="t"), (), "unix:/run/b.sock", True),
        (Security(token="t", insecure=True), (), "node-7:5", False),
        (Security(token="t", ca=OWN), (), "node-7:5", True),
        (Security(token="t", ca=OWN), (), "unix:/tmp/mine.sock", False),
        (Security(token="t", ca=SYSTEM), (), "node-7:5", False),
        (Security(token="t", server_name="buffer"), (), "node-7:5", False),
        (Security(token="t", ca=OWN), ("unix:/run/b.sock",), "unix:/run/b.sock", True),
        (Security(token="t", insecure=True), ("node-*.lab:5",), "node-7.lab:5", True),
        (Security(token="t", insecure=True), ("node-*.lab:5",), "node-7.lab:50", False),
        (Security(token="t", insecure=True), ("*.lab:5",), "unix:/tmp/x.lab:5", False),
        (Security(token="t", insecure=True), ("*.lab:5",), "dns://6.6.6.6/x.lab:5", False),
        (Security(token="t", insecure=True), ("*.lab:5",), "127.0.0.1:5", False),
        (Security(), ("buffer:5",), "node-7:5", False),
        (Security(), (), "node-7:5", True),
    ],
)
async def test_only_targets_that_the_settings_trust_are_called(
    security: Security, allowed: tuple[str, ...], target: str, called: bool, tmp_path: Path
) -> None:
    """Whoever may name a target could name a server of their own, and collect the token of the service."""
    if security.ca == OWN:
        security = replace(security, ca=Authority(tmp_path).ca)
    dialer = Dialer(security, allowed)
    if called:
        await dialer.open(target).channel.close()
    else:
        with pytest.raises(TurnoutError, match="allow_peer"):
            dialer.open(target)
