"""The HTTP endpoint of a service's metrics.

Invariants: it runs in threads of its own, and whatever others do to its port takes no more than `PLACES` of them and of
the process' files, each for no longer than its peer stays silent for `SILENCE_S`; a renewed certificate is shown in the
next handshake.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from services.runtime.addresses import Address, AddressError, check_free
from services.runtime.discovery import Discovery
from services.runtime.tls import ServerTls

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

SD_PATH: Final = "/sd"
"""Where the list for Prometheus' `http_sd_configs` is."""

PLACES: Final = 64
"""Connections at once; a handful of Prometheus servers take one each, for the time of a scrape."""

SILENCE_S: Final = 10.0
"""Wall seconds in which a peer has to send or take something; as gRPC gives to a handshake."""


class MetricsServer:
    """Serves a registry at http://HOST:PORT/metrics (https:// over TLS), and where else metrics are at /sd."""

    def __init__(
        self, address: Address, registry: CollectorRegistry, discovery: Discovery, tls: ServerTls | None = None
    ) -> None:
        check_free(address)
        try:
            self._server = _Server(address)
        except OSError as error:
            raise AddressError(f"cannot serve metrics on {address}: {error.strerror}") from error
        if tls is not None:
            self._server.socket = _over_tls(self._server.socket, tls)
        scheme = "http" if tls is None else "https"
        address = address.with_port(self._server.server_port)
        self.url = f"{scheme}://{address}/metrics"
        metrics = make_wsgi_app(registry)

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if environ.get("PATH_INFO") != SD_PATH:
                answer: Iterable[bytes] = metrics(environ, start_response)
                return answer
            try:
                # Whoever asks reached us under a name that works for it, which a wildcard address is not.
                content = discovery.as_json(f"{scheme}://{environ.get('HTTP_HOST') or address}")
            except (TimeoutError, RuntimeError):
                # With an error Prometheus keeps the targets that it had.
                start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
                return [b"the service does not answer now\n"]
            start_response("200 OK", [("Content-Type", "application/json")])
            return [content]

        self._server.set_app(app)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: a scrape is no event."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, up to a number of them."""

    daemon_threads = True
    request_queue_size = PLACES

    def __init__(self, address: Address) -> None:
        self.address_family, _, _, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._places = BoundedSemaphore(PLACES)
        super().__init__((str(place[0]), int(place[1])), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a connection's thread, or hang up if too many are open."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """What the thread does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a peer that hung up or speaks no TLS is its own affair, and anybody's to send."""


def _over_tls(listening: socket.socket, tls: ServerTls) -> ssl.SSLSocket:
    # The handshake is for the thread of the request: a silent peer must not keep the others waiting.
    over = tls.context().wrap_socket(listening, server_side=True, do_handshake_on_connect=False)

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = tls.context()

    over.context.sni_callback = renew
    return over
