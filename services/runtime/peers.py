"""The way from a service to the services it calls.

Invariants: TLS and the token of these calls are settings of their own, apart from those that the service is called
with; a peer that went away is noticed within 15 s, one that came back is found within about two.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import grpc.aio
from pydantic import Field, model_validator

from services.runtime.config import ServiceSettings
from services.runtime.errors import failed_precondition
from turnout.channels import SYSTEM, Security, SecurityError, bind, channel_options, connect

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
        description="PEM file of the authorities that vouch for the services called, which are then called over TLS; "
        "'system': gRPC's own.",
    )
    peer_cert: Path | None = Field(None, description="PEM file of the certificate shown to them, for mutual TLS.")
    peer_key: Path | None = Field(None, description="PEM file of its private key.")
    peer_server_name: str | None = Field(
        None, description="Name that their certificates must bear, if it is not the host of the target."
    )
    peer_token_file: Path | None = Field(
        None, description="File with the token shown to them, of role service; read again when it changes."
    )

    @model_validator(mode="after")
    def _peers(self) -> Self:
        self.peer_security()
        return self

    def peer_security(self) -> Security:
        """TLS and the token of the calls to others."""
        return Security(
            ca=self.peer_ca,
            cert=self.peer_cert,
            key=self.peer_key,
            server_name=self.peer_server_name,
            token_file=self.peer_token_file,
            insecure=self.insecure,
        )

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


def open_peer(target: str, security: Security) -> PeerChannel:
    """Open a channel with a connection of its own. Raises FAILED_PRECONDITION / PEER_SECURITY."""
    try:
        channel = connect(target, peer_options(target), security)
        return PeerChannel(channel, bind(channel, security))
    except SecurityError as error:
        raise failed_precondition("PEER_SECURITY", str(error), target=target) from error
