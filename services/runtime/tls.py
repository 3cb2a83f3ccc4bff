"""The certificates that a service shows, and those that it asks for.

Invariants: a certificate that does not fit its key is an error at the start; renewed files are used by the next
connection, and a pair that is half written leaves the last one in force.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from threading import Lock
from typing import Any, cast

import grpc

from services.runtime.logs import get_logger


class TlsError(ValueError):
    """TLS cannot be served with these files; the message is one line for a person."""


class ServerTls:
    """TLS of one server: mutual TLS if there is `client_ca`, whose certificates callers must then have."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Read and check the files; raises TlsError."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._log = get_logger("tls")
        # Connections ask from threads of gRPC's own.
        self._lock = Lock()
        self._problem = ""
        self._seen = self._state()
        self._context, self._configuration = self._load()

    def credentials(self) -> grpc.ServerCredentials:
        """What gRPC listens with."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            # It may say that nothing changed, which its annotation leaves out.
            cast(Any, self._renewed),
            require_client_authentication=self._client_ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        """What an HTTP server shows its certificate by in the next handshake."""
        self._refresh()
        return self._context

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        return self._configuration if self._refresh() else None

    def _refresh(self) -> bool:
        """Take the files as they are now, if they changed and fit together."""
        with self._lock:
            problem, changed = "", False
            try:
                seen = self._state()
                if seen != self._seen:
                    self._context, self._configuration = self._load()
                    self._seen, changed = seen, True
                    self._log.info("certificate read again", cert=str(self._cert))
            except TlsError as error:
                problem = str(error)
                if problem != self._problem:
                    self._log.error("the certificate stays as it was", problem=problem)
            self._problem = problem
            return changed

    def _load(self) -> tuple[ssl.SSLContext, grpc.ServerCertificateConfiguration]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An encrypted key would ask the terminal for its password.
            context.load_cert_chain(self._cert, self._key, password="")
        except (OSError, ValueError) as error:
            raise TlsError(f"{self._cert} and {self._key} are no certificate with its key: {_why(error)}") from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                raise TlsError(f"{self._client_ca} holds no certificates: {_why(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        try:
            pair = (self._key.read_bytes(), self._cert.read_bytes())
            roots = None if self._client_ca is None else self._client_ca.read_bytes()
        except OSError as error:
            raise TlsError(f"{error.filename} cannot be read: {error.strerror}") from None
        return context, grpc.ssl_server_certificate_configuration([pair], roots)

    def _state(self) -> list[tuple[int, int, int]]:
        paths = [path for path in (self._cert, self._key, self._client_ca) if path is not None]
        try:
            states = [os.stat(path) for path in paths]
        except OSError as error:
            raise TlsError(f"{error.filename} cannot be read: {error.strerror}") from None
        return [(state.st_mtime_ns, state.st_ino, state.st_size) for state in states]


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
