"""The way from a service to the services it calls.

Invariants: TLS and the token of these calls are settings of their own, apart from those that the service is called
with; others name the targets, so the token goes to none but those that the settings trust; a peer that went away is
noticed within 15 s, one that came back is found within about two.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import grpc.aio
from pydantic import Field, model_validator

from services.runtime.config import ServiceSettings, Strings
from services.runtime.errors import failed_precondition
from turnout.channels import SYSTEM, Security, SecurityError, bind, channel_options, connect, is_local

MAX_MESSAGE_BYTES: Final = 64 << 20
"""An output of some million tokens, or the replicas and progress of a large run, pass the 4 MiB of gRPC's default."""

_KEEPALIVE_S: Final = 10.0
_KEEPALIVE_TIMEOUT_S: Final = 5.0
_RECONNECT_S: Final = 2.0
_CONNECT_MS: Final = 2000
"""An address that swallows packets is tried again after this; gRPC's default is 20 s."""


class PeerSettings(ServiceSettings):
    """Settings of a service that calls others."""

    peer_ca: str | None = Field(
        None,
        description="PEM file of the authorities that vouch for the services called, which are then called over TLS, "
        "and for https engines and hooks; 'system': gRPC's own.",
    )
    peer_cert: Path | None = Field(None, description="PEM file of the certificate shown to them, for mutual TLS.")
    peer_key: Path | None = Field(None, description="PEM file of its private key.")
    peer_server_name: str | None = Field(
        None, description="Name that their certificates must bear, if it is not the host of the target."
    )
    peer_token_file: Path | None = Field(
        None, description="File with the token shown to them, of role service; read again when it changes."
    )

    allow_peer: Strings = Field(
        [],
        description="A target that may be called, as callers name it, of an HTTP engine HOST:PORT; * stands for "
        "letters, digits, dots and hyphens. "
        "Default with a token: servers that a peer_ca of one's own vouches for; without peer_ca, loopback and Unix "
        "sockets. Default without one: all.",
    )

    @model_validator(mode="after")
    def _peers(self) -> Self:
        self.dialer()
        return self

    def dialer(self) -> Dialer:
        """How others are called."""
        security = Security(
            ca=self.peer_ca,
            cert=self.peer_cert,
            key=self.peer_key,
            server_name=self.peer_server_name,
            token_file=self.peer_token_file,
            insecure=self.insecure,
        )
        return Dialer(security, tuple(self.allow_peer))

    def peer_context(self) -> ssl.SSLContext:
        """TLS of the calls to others that are HTTP. Raises OSError: a file cannot be used."""
        context = ssl.create_default_context(cafile=None if self.peer_ca in (None, SYSTEM) else self.peer_ca)
        if self.peer_cert is not None and self.peer_key is not None:
            context.load_cert_chain(self.peer_cert, self.peer_key, password="")
        return context


@dataclass(frozen=True, slots=True)
class PeerChannel:
    """A connection to a peer."""

    channel: grpc.aio.Channel
    """To be closed."""
    stubs: grpc.aio.Channel
    """What stubs are made of; their calls carry the token."""


def peer_options(target: str) -> list[tuple[str, int | str]]:
    """Return gRPC's options for a channel to a peer."""
    options = channel_options(
        target,
        max_message_bytes=MAX_MESSAGE_BYTES,
        keepalive_s=_KEEPALIVE_S,
        keepalive_timeout_s=_KEEPALIVE_TIMEOUT_S,
        reconnect_s=_RECONNECT_S,
    )
    # Pings go on between two calls: a watch must not be opened over a connection that died unseen.
    return [*options, ("grpc.keepalive_permit_without_calls", 1), ("grpc.min_reconnect_backoff_ms", _CONNECT_MS)]


@dataclass(frozen=True, slots=True)
class Dialer:
    """How a service calls others."""

    security: Security = field(default_factory=Security)
    allowed: tuple[str, ...] = ()
    """Targets that may be called; see `PeerSettings.allow_peer`."""

    def open(self, target: str) -> PeerChannel:
        """Open a channel with a connection of its own. Raises FAILED_PRECONDITION / PEER_SECURITY."""
        try:
            if not self._may_call(target):
                raise SecurityError(f"this service does not call {target} as itself: no allow_peer names it")
            channel = connect(target, peer_options(target), self.security)
            return PeerChannel(channel, bind(channel, self.security))
        except SecurityError as error:
            raise failed_precondition("PEER_SECURITY", str(error), target=target) from error

    def check_open(self, target: str) -> None:
        """Refuse a server that gets no token, as HOST:PORT, if there is a list of those that may be called and it is
        not on it. Raises FAILED_PRECONDITION / PEER_SECURITY."""
        if self.allowed and not self._listed(target):
            raise failed_precondition(
                "PEER_SECURITY", f"this service does not call {target}: no allow_peer names it", target=target
            )

    def _listed(self, target: str) -> bool:
        return any(_matches(pattern, target) for pattern in self.allowed)

    def _may_call(self, target: str) -> bool:
        if self.allowed:
            return self._listed(target)
        if self.security.metadata() is None:
            return True
        # Whoever asked may have made the target up. An authority of everybody vouches for servers of everybody.
        if self.security.ca is not None:
            return str(self.security.ca) != SYSTEM and self.security.is_tls(target)
        return is_local(target)


def _matches(pattern: str, target: str) -> bool:
    # Neither a scheme nor a path fits into a *: behind dns: or unix: the same name is somebody else's.
    return re.fullmatch("[A-Za-z0-9.-]*".join(map(re.escape, pattern.split("*"))), target) is not None
