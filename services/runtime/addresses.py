"""Where a service listens.

Invariants: an address is `host:port`, `[ipv6]:port` or `unix:/path`, nothing else; a port is 0 to 65535; what is not
loopback or a Unix socket counts as reachable from outside.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from typing import Final

_MAX_UNIX_PATH_BYTES: Final = 107
"""sun_path of Linux, less its closing zero byte."""


class AddressError(ValueError):
    """An address that is malformed or cannot be listened on; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Address:
    """A place to listen. `path` is set for a Unix socket, else `host` (without brackets) and `port`."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def with_port(self, port: int) -> Address:
        """Return the same place with the port that the system gave."""
        return self if self.path else Address(self.host, port)

    def for_clients(self) -> Address:
        """Return the form that clients on this machine can call.

        On `[::]` gRPC listens for IPv4 as well; where IPv6 is off, its clients reach that alone.
        """
        return Address("0.0.0.0", self.port) if self.host == "::" and not _ipv6_is_on() else self

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _ipv6_is_on() -> bool:
    """Whether the loopback of IPv6 is there: gRPC goes by the same."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def parse_address(text: str) -> Address:
    """Return the address that `text` means, or raise AddressError."""
    if text.startswith("unix:"):
        path = re.sub(r"^//(?=/)", "", text.removeprefix("unix:"))
        if not path or "\0" in path:
            raise AddressError(f"{text!r} has no path after unix:")
        if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
            raise AddressError(f"{text!r} is too long for a Unix socket ({_MAX_UNIX_PATH_BYTES} bytes at most)")
        return Address(path=path)
    bracketed = re.fullmatch(r"\[(?P<host>[^\[\]]*)\]:(?P<port>.*)", text)
    if bracketed:
        host, port = bracketed["host"], bracketed["port"]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise AddressError(f"{text!r} has no IPv6 address in its brackets") from None
        return Address(host, _port(text, port))
    if text.count(":") > 1:
        raise AddressError(f"{text!r} is ambiguous: write an IPv6 address in brackets, as in [::1]:50051")
    host, colon, port = text.partition(":")
    if not colon:
        raise AddressError(f"{text!r} has no port: write {text}:PORT (port 0 takes a free one)")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", host):
        raise AddressError(f"{text!r} has no valid host before the port")
    return Address(host, _port(text, port))


def _port(text: str, port: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise AddressError(f"{text!r} has no valid port: {port!r} is not a number from 0 to 65535")
    return int(port)


def check_free(address: Address) -> None:
    """Raise AddressError, with the reason, if nothing could listen on `address` now.

    gRPC itself says only "failed to bind" and would delete a Unix socket that is in use. A socket file that nobody
    listens on any more is removed.
    """
    if address.path:
        _check_unix(address)
        return
    try:
        places = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"cannot listen on {address}: unknown host {address.host!r}") from error
    failures: list[OSError] = []
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does: a port in TIME_WAIT is free, one that somebody listens on is not.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            failures.append(error)
    in_use = [error for error in failures if error.errno == errno.EADDRINUSE]
    if in_use or len(failures) == len(places):
        raise AddressError(f"cannot listen on {address}: {_why((in_use or failures)[0])}")


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "address in use"
    return (error.strerror or str(error)).lower()


def _check_unix(address: Address) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(address.path).st_mode):
            raise AddressError(f"cannot listen on {address}: there is a file of that name that is no socket")
    except FileNotFoundError:
        directory = os.path.dirname(address.path) or "."
        if not os.access(directory, os.W_OK | os.X_OK):
            raise AddressError(f"cannot listen on {address}: {directory} is no directory one can write to") from None
        return
    except OSError as error:
        raise AddressError(f"cannot listen on {address}: {_why(error)}") from error
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address.path)
        except OSError as error:
            raise AddressError(f"cannot listen on {address}: {_why(error)}") from error
        else:
            raise AddressError(f"cannot listen on {address}: address in use")
