"""Channels as all clients of a service open them, the services among them.

Invariants: a peer that went away is noticed within seconds, also while nothing but a quiet wait is open; a service that
came back is found within seconds; every channel has a connection of its own; loopback never goes through a proxy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc.aio

from turnout import tracing
from turnout.channels._security import Metadata, Security
from turnout.channels._targets import is_local

Option = tuple[str, int | str]

_RECONNECT_FIRST_MS: Final = 100


def channel_options(
    target: str, *, max_message_bytes: int, keepalive_s: float, keepalive_timeout_s: float, reconnect_s: float
) -> list[Option]:
    """Return gRPC's options for a channel to `target`; `reconnect_s` is the longest pause between two attempts."""
    timeout_ms = round(keepalive_timeout_s * 1000)
    return [
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # The first one bounds the write, this one the answer; without it a silent peer is noticed after a minute.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        # A wait sends nothing for minutes; gRPC would stop pinging after two.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
        # gRPC's own limit of two minutes would keep a client away long after a service is back.
        ("grpc.max_reconnect_backoff_ms", round(reconnect_s * 1000)),
        # Otherwise gRPC gives all channels of a process to one target the same connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0 if is_local(target) else 1),
    ]


def connect(target: str, options: Sequence[Option], security: Security) -> grpc.aio.Channel:
    """Return an asyncio channel to `target`, plain or over TLS; it connects with its first call.

    Raises SecurityError: a file cannot be read, or a token would travel in the open.
    """
    credentials = security.credentials(target)
    arguments = [*options, *security.options(target)]
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=arguments)
    return grpc.aio.secure_channel(target, credentials, options=arguments)


def metadata_of(security: Security) -> Metadata | None:
    """Return what a call carries: the token, and the trace that it is made in. None: nothing."""
    token = security.metadata()
    headers = tracing.headers()
    return (*token, *headers) if token and headers else token or headers or None


class _Bound:
    """A channel as stubs use it: every call over it carries token and trace."""

    def __init__(self, channel: grpc.aio.Channel, security: Security) -> None:
        self._channel = channel
        self._security = security

    def unary_unary(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._with_metadata(self._channel.unary_unary(*arguments, **named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._with_metadata(self._channel.unary_stream(*arguments, **named))

    def stream_unary(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._with_metadata(self._channel.stream_unary(*arguments, **named))

    def stream_stream(self, *arguments: Any, **named: Any) -> Callable[..., Any]:
        return self._with_metadata(self._channel.stream_stream(*arguments, **named))

    def _with_metadata(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda request, **how: call(request, metadata=metadata_of(self._security), **how)


def bind(channel: grpc.aio.Channel, security: Security) -> grpc.aio.Channel:
    """Return what stubs are made of: `channel`, with token and trace on every call. Close the channel, not this."""
    bare = security.metadata() is None and not tracing.enabled()
    bound: Any = channel if bare else _Bound(channel, security)
    return bound  # type: ignore[no-any-return]
