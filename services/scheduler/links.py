"""The way to the run's replay buffer and engine controller.

Invariants: an error of a peer becomes an error of ours, that of a silent peer UNAVAILABLE naming it; loopback and Unix
sockets are reached directly, whatever proxy the environment names.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from services.runtime.errors import Code, TurnoutError, invalid_argument, unavailable
from services.runtime.statuses import from_rpc_error

_MAX_MESSAGE_BYTES: Final = 64 << 20
"""ListReplicas and progress of a large run pass the 4 MiB that gRPC allows by default."""

_KEEPALIVE_MS: Final = 10_000
_KEEPALIVE_TIMEOUT_MS: Final = 5_000
"""A peer whose machine is gone is noticed within 15 s, also while nothing but a watch is open."""

_MAX_BACKOFF_MS: Final = 2_000
"""A peer that was restarted is found again within about this time; gRPC's own default is two minutes."""


_PROXY_VARIABLES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
"""Where gRPC finds a proxy, the first that is set."""


def _is_local(target: str) -> bool:
    """Whether a target is this machine: a proxy must not get in between."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = target.rpartition("/")[2].removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def channel_options(target: str) -> list[tuple[str, int]]:
    """The options of a channel to `target`."""
    options = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Nothing is sent while a watch is quiet; gRPC would stop pinging after two.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", _MAX_BACKOFF_MS),
        ("grpc.initial_reconnect_backoff_ms", 100),
    ]
    if _is_local(target):
        options.append(("grpc.enable_http_proxy", 0))
    return options


@dataclass(frozen=True, slots=True)
class Link:
    """The way to one peer.

    Parked streams have a connection of their own, so that they never stand in the way of the call that releases them.
    """

    control: grpc.aio.Channel
    parked: grpc.aio.Channel


class Links:
    """One link per target, shared by all runs."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def get(self, field: str, target: str) -> Link:
        """The link to `target`. An empty target is INVALID_ARGUMENT naming `field`."""
        if not target:
            raise invalid_argument(field, f"{field} must not be empty", value=target)
        if target not in self._links:
            self._links[target] = Link(
                grpc.aio.insecure_channel(target, options=channel_options(target)),
                grpc.aio.insecure_channel(
                    target, options=[*channel_options(target), ("grpc.use_local_subchannel_pool", 1)]
                ),
            )
        return self._links[target]

    async def close(self) -> None:
        """Close them all."""
        for link in self._links.values():
            await link.control.close()
            await link.parked.close()
        self._links.clear()


@asynccontextmanager
async def errors_of(reason: str, target: str) -> AsyncIterator[None]:
    """Turn what a stub raises into our errors; `reason` is that of a peer that does not answer."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _translated(from_rpc_error(error), reason, target) from error


def _translated(error: TurnoutError, reason: str, target: str) -> TurnoutError:
    # A status without our ErrorInfo has its code as reason: the transport speaks, not the peer.
    silent = error.reason == error.code.name
    if silent and error.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.UNKNOWN, Code.CANCELLED):
        peer = reason.partition("_")[0].lower()
        message = f"the {peer} at {target} did not answer: {error.message}"
        metadata = {"target": target, "code": error.code.name}
        variable = None if _is_local(target) else next(filter(os.environ.get, _PROXY_VARIABLES), None)
        if variable is not None:
            message += f" (the environment's {variable} sends this through a proxy)"
            metadata["proxy_variable"] = variable
        return unavailable(reason, message, **metadata)
    return error


def unanswered(error: TurnoutError) -> bool:
    """Whether `error` says that a peer could not be reached or is stopping: to be tried again."""
    return error.code is Code.UNAVAILABLE


async def stream_of(begin: Callable[[], Any], reason: str, target: str) -> AsyncGenerator[Any, None]:
    """The messages of the call that `begin` makes; closing the generator ends it."""
    call = begin()
    try:
        async with errors_of(reason, target):
            async for message in call:
                yield message
    finally:
        call.cancel()
