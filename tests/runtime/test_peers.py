"""The way from a service to the services it calls."""

from __future__ import annotations

import pytest

from services.runtime.errors import Code, TurnoutError
from services.runtime.peers import open_peer, peer_options
from turnout.channels import Security


def test_a_quiet_watch_is_pinged_for_as_long_as_it_is_open() -> None:
    """By default gRPC stops after two pings without data, and a peer whose machine is gone is followed for hours."""
    options = dict(peer_options("node-7:5"))
    assert options["grpc.http2.max_pings_without_data"] == 0
    assert int(options["grpc.keepalive_time_ms"]) + int(options["grpc.http2.ping_timeout_ms"]) <= 15_000


def test_a_target_that_a_token_may_not_travel_to_is_refused_by_name() -> None:
    """A trainer names the peers: a typo of it must not send the scheduler's token in the open, nor crash a run."""
    with pytest.raises(TurnoutError) as caught:
        open_peer("node-7:50051", Security(token="turnout.s.x"))
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "PEER_SECURITY")
    assert caught.value.metadata == {"target": "node-7:50051"}
    assert "turnout.s.x" not in str(caught.value)
