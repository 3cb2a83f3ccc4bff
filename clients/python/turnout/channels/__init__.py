"""The way to a service: what its target says, gRPC's options, TLS and the token.

One place for the Python client and for the services, which are each other's clients.
"""

from turnout.channels._open import bind, channel_options, connect, metadata_of
from turnout.channels._security import SYSTEM, Security, SecurityError
from turnout.channels._targets import host_of, is_local, proxy_hint, proxy_variable

__all__ = [
    "SYSTEM",
    "Security",
    "SecurityError",
    "bind",
    "channel_options",
    "connect",
    "host_of",
    "is_local",
    "metadata_of",
    "proxy_hint",
    "proxy_variable",
]
