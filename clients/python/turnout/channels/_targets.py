"""What a target says about the way to it.

Invariants: pure. A local target (loopback address, unix socket) never goes through a proxy, whatever the environment
says; for any other, the variable that sends it through one can be named.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import unquote

# The variables gRPC reads, in its order.
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")


def host_of(target: str) -> str | None:
    """Return the host that a gRPC target names; None for a socket that is not on a network."""
    text = target
    if text.startswith(("unix:", "unix-abstract:", "vsock:")):
        return None
    for scheme in ("dns:", "ipv4:", "ipv6:", "passthrough:"):
        if text.startswith(scheme):
            text = text.removeprefix(scheme)
            if text.startswith("//"):
                # An authority (a name server) may stand between the slashes.
                text = text[2:].partition("/")[2]
            break
    text = unquote(text.lstrip("/"))
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text if text.count(":") > 1 else text.partition(":")[0]


def is_local(target: str) -> bool:
    """Whether a target is on this machine: a loopback address, localhost or a unix socket."""
    host = host_of(target)
    if host is None or host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def proxy_variable(target: str, environ: Mapping[str, str]) -> str | None:
    """Return the name of the environment variable that sends a target through a proxy, or None."""
    if is_local(target):
        return None
    host = host_of(target) or ""
    for name in _NO_PROXY_VARIABLES:
        if environ.get(name):
            if any(host.endswith(suffix.strip()) for suffix in environ[name].split(",") if suffix.strip()):
                return None
            break
    return next((name for name in _PROXY_VARIABLES if environ.get(name)), None)


def proxy_hint(target: str, environ: Mapping[str, str]) -> str:
    """Return a sentence for an error text if a proxy stands in the way, else an empty string."""
    name = proxy_variable(target, environ)
    if name is None:
        return ""
    return f"the environment variable {name} sends {target} through a proxy; no_proxy exempts hosts"
