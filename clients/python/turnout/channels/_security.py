"""TLS and the token of whoever calls a service.

Invariants: a token never stands in a repr or an error, and is never sent to another machine without TLS unless
`insecure` says so; Unix sockets are plain, everything else is TLS as soon as anything of TLS is given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import grpc

from turnout.channels._targets import is_local

SYSTEM: Final = "system"
"""In place of a file: the authorities that gRPC brings along."""

_VISIBLE: Final = re.compile(r"[\x21-\x7e]+")
_YES: Final = ("1", "true", "yes", "on")

Metadata = tuple[tuple[str, str], ...]


class SecurityError(ValueError):
    """TLS or a token cannot be used as given; the message is one line for a person, without the token."""


class _TokenFile:
    """The token in a file, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._token = ""

    def read(self) -> str:
        """Return the token. A file that cannot be read leaves the last one in force; without one SecurityError."""
        try:
            state = os.stat(self._path)
            seen = (state.st_mtime_ns, state.st_ino, state.st_size)
            if seen != self._seen:
                self._token = _token(self._path.read_text(encoding="ascii").strip(), f"the token in {self._path}")
                self._seen = seen
        except (OSError, UnicodeDecodeError) as error:
            if not self._token:
                reason = getattr(error, "strerror", None) or "not ASCII text"
                raise SecurityError(f"the token file {self._path} cannot be read: {reason}") from None
        return self._token


@dataclass(frozen=True, slots=True)
class Security:
    """How a client shows who it is, and knows whom it talks to. Files are PEM."""

    ca: str | Path | None = None
    """Authorities that vouch for the servers; "system": those that gRPC brings along."""
    cert: str | Path | None = None
    """The client's own certificate, for mutual TLS; with `key`."""
    key: str | Path | None = None
    """Its private key."""
    server_name: str | None = None
    """Name that the server's certificate must bear, if it is not the host of the target."""
    token: str | None = field(default=None, repr=False)
    """What the client may do, as `turnout token new` printed it."""
    token_file: str | Path | None = None
    """File that holds the token; read again when it changes."""
    insecure: bool = False
    """Send the token also without TLS to other machines."""
    _file: _TokenFile | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise SecurityError("a client certificate needs both cert and key")
        if self.token is not None and self.token_file is not None:
            raise SecurityError("give token or token_file, not both")
        if self.token is not None:
            _token(self.token, "the token")
        if self.token_file is not None:
            object.__setattr__(self, "_file", _TokenFile(Path(self.token_file)))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read TURNOUT_CA, _CERT, _KEY, _SERVER_NAME, _TOKEN, _TOKEN_FILE and _INSECURE; an empty one is unset."""
        values = os.environ if environ is None else environ
        fields = ("ca", "cert", "key", "server_name", "token", "token_file")
        given: dict[str, Any] = {name: values.get(f"TURNOUT_{name.upper()}") or None for name in fields}
        return cls(**given, insecure=values.get("TURNOUT_INSECURE", "").lower() in _YES)

    def is_tls(self, target: str) -> bool:
        """Whether calls to `target` go over TLS."""
        given = self.ca is not None or self.cert is not None or self.server_name is not None
        return given and not target.startswith(("unix:", "unix-abstract:"))

    def credentials(self, target: str) -> grpc.ChannelCredentials | None:
        """Return what a channel to `target` needs; None: plain text.

        Raises SecurityError: a file cannot be read, or a token would travel in the open.
        """
        self._check(target)
        if not self.is_tls(target):
            return None
        ca = None if self.ca is None or str(self.ca) == SYSTEM else _read(self.ca)
        cert, key = (None if path is None else _read(path) for path in (self.cert, self.key))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def options(self, target: str) -> list[tuple[str, str]]:
        """Return gRPC's options for a channel to `target`."""
        if self.server_name is None or not self.is_tls(target):
            return []
        return [("grpc.ssl_target_name_override", self.server_name), ("grpc.default_authority", self.server_name)]

    def metadata(self) -> Metadata | None:
        """Return what every call carries; None: nothing. Raises SecurityError: the token file cannot be read."""
        token = self.token if self._file is None else self._file.read()
        return None if token is None else (("authorization", f"Bearer {token}"),)

    def _check(self, target: str) -> None:
        if (self.token or self._file) and not (self.insecure or self.is_tls(target) or is_local(target)):
            raise SecurityError(
                f"a token is not sent to {target} without TLS: give the authority of its certificate (TURNOUT_CA), "
                "or allow it with TURNOUT_INSECURE=1"
            )


def _token(text: str, what: str) -> str:
    if not _VISIBLE.fullmatch(text):
        raise SecurityError(f"{what} is empty, or has characters that no token has")
    return text


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SecurityError(f"{path} cannot be read: {error.strerror}") from None
