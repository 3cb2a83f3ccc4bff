"""The way to a run's peers."""

from services.scheduler.links import channel_options


def test_a_quiet_watch_is_pinged_for_as_long_as_it_is_open() -> None:
    """By default gRPC stops after two pings without data, and a peer whose machine is gone is followed for hours."""
    options = dict(channel_options("node-7:5"))
    assert options["grpc.http2.max_pings_without_data"] == 0
    assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] <= 15_000
