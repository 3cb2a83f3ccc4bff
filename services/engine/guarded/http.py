"""An engine's HTTP server: what its answers and its streams mean, whichever engine it is.

Invariants: control calls and requests have connections of their own, so that none waits for one; a command ends when
the engine is done with it and only reads have a timeout, since whoever commands keeps the time; an answer counts by
what it says and not by its status alone; a stream that ends before the server said so is an error.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from services.engine.backends.base import engine_dead
from services.runtime.errors import (
    TurnoutError,
    aborted,
    deadline_exceeded,
    failed_precondition,
    invalid_argument,
    unavailable,
)
from services.runtime.peers import Dialer

CHECK_S: Final = 0.5
"""Wall seconds for a sign of life while a call is under way; a front end that is alive gives it at once."""

READ_S: Final = 10.0
"""Wall seconds for reads; whoever asks usually gives up before."""


class HttpServer:
    """One server. `check` raises if its engine is gone; `tls` counts for https.

    Routes that begin with `judges` answer 4xx for what the caller asked; elsewhere that is a failure of the engine.
    """

    def __init__(
        self,
        url: str,
        transport: httpx.AsyncBaseTransport | None,
        *,
        check: Callable[[], Awaitable[None]],
        judges: str = "/",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._check = check
        self._judges = judges
        verify = True if tls is None else tls
        self._control = httpx.AsyncClient(
            base_url=self.url,
            transport=transport,
            verify=verify,
            timeout=httpx.Timeout(READ_S, read=None),
            trust_env=False,
        )
        self._data = httpx.AsyncClient(
            base_url=self.url,
            transport=transport,
            verify=verify,
            timeout=httpx.Timeout(READ_S, read=None, pool=None),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def request(self, method: str, route: str, timeout: float | None = None, **content: Any) -> httpx.Response:
        """Any answer. DEADLINE_EXCEEDED / ENGINE_UNRESPONSIVE or UNAVAILABLE / ENGINE_UNREACHABLE without one."""
        limit = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            return await self._control.request(method, route, timeout=limit, **content)
        except httpx.TimeoutException as error:
            raise deadline_exceeded("ENGINE_UNRESPONSIVE", f"{self.url} does not answer in time") from error
        except httpx.TransportError as error:
            raise unavailable("ENGINE_UNREACHABLE", f"{self.url}: {type(error).__name__}") from error

    async def send(self, method: str, route: str, timeout: float | None = None, **content: Any) -> httpx.Response:
        """An answer that is a success by its status and carries no error."""
        return await self.accept(await self.request(method, route, timeout, **content))

    async def accept(self, answer: httpx.Response) -> httpx.Response:
        """The same answer, if it is such a success."""
        if answer.status_code != HTTPStatus.OK:
            raise await self._failed(answer)
        error = read_object(answer).get("error")
        if error:
            raise aborted("ENGINE_FAILED", f"{self.url} failed: {str(error)[:300]}")
        return answer

    async def get(self, route: str, query: Any = None, timeout: float = READ_S) -> httpx.Response:
        """Read something."""
        return await self.send("GET", route, timeout, params=query)

    async def post(self, route: str, query: Any = None, body: Any = None) -> httpx.Response:
        """Command something, for as long as it takes."""
        return await self.send("POST", route, params=query, json=body)

    async def has(self, route: str, by: str) -> bool:
        """Whether a route is there: one that takes POST refuses the method `by`, and carries nothing out."""
        answer = await self.request(by, route, READ_S)
        return answer.status_code == HTTPStatus.METHOD_NOT_ALLOWED

    async def sign_of_life(self, route: str) -> int | None:
        """The status of a route that is answered at once, None if it hangs; UNAVAILABLE / ENGINE_DEAD if it is gone."""
        try:
            answer = await self._control.get(route, timeout=CHECK_S)
        except httpx.TimeoutException:
            # A process that hangs is not a dead one: the deadline of the call decides.
            return None
        except httpx.TransportError as error:
            raise engine_dead(f"{self.url} does not answer: {type(error).__name__}") from error
        return answer.status_code

    async def stream(
        self, route: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a stream of server-sent events, up to its [DONE]."""
        try:
            async with self._data.stream("POST", route, json=body, headers=headers) as answer:
                if answer.status_code != HTTPStatus.OK:
                    await answer.aread()
                    raise await self._failed(answer)
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield json.loads(data)
        except httpx.TransportError as error:
            await self._check()
            raise self.ended_stream(f"cut a stream: {type(error).__name__}") from error
        raise self.ended_stream("ended a stream without saying why")

    async def close(self) -> None:
        """Close all connections."""
        await self._control.aclose()
        await self._data.aclose()

    def ended_stream(self, how: str) -> TurnoutError:
        """The error of a stream that ended before its request did."""
        return unavailable("ENGINE_ENDED_STREAM", f"{self.url} {how}")

    def not_offered(self, why: str) -> TurnoutError:
        """The error of a call that the server has not, or was not started for."""
        return failed_precondition("NOT_OFFERED", f"{self.url}: {why}")

    async def _failed(self, answer: httpx.Response) -> TurnoutError:
        path = answer.request.url.path
        told = f"{path} of {self.url} answered {answer.status_code}: {answer.text[:300]}"
        match answer.status_code:
            case HTTPStatus.SERVICE_UNAVAILABLE:
                # Said by a dead engine, and by one that is paused (vLLM from 0.33) or full.
                await self._check()
                return unavailable("ENGINE_BUSY", told)
            case HTTPStatus.NOT_FOUND | HTTPStatus.METHOD_NOT_ALLOWED:
                return failed_precondition("NOT_OFFERED", told)
            case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
                return failed_precondition("ENGINE_KEY_NEEDED", told)
            case code if code < HTTPStatus.INTERNAL_SERVER_ERROR and path.startswith(self._judges):
                return invalid_argument("request", told, reason="ENGINE_REFUSED")
            case _:
                return aborted("ENGINE_FAILED", told)


@dataclass(frozen=True, slots=True)
class HttpPeers:
    """Which HTTP servers may be called, and how those of https are checked. `tls` may raise OSError."""

    dialer: Dialer = field(default_factory=Dialer)
    tls: Callable[[], ssl.SSLContext] = ssl.create_default_context

    def reach(self, backend: str, endpoint: str) -> tuple[str, ssl.SSLContext | None]:
        """The URL that `spec.endpoint` is, and the TLS that it is called with.

        Raises INVALID_ARGUMENT if it is no URL, FAILED_PRECONDITION / PEER_SECURITY if it may not be called.
        """
        url = httpx.URL(require_url(backend, endpoint))
        # As the client connects, whatever else reads the same text.
        host = url.raw_host.decode("ascii")
        host = f"[{host}]" if ":" in host else host
        self.dialer.check_open(f"{host}:{url.port or (443 if url.scheme == 'https' else 80)}")
        if url.scheme != "https":
            return endpoint, None
        try:
            return endpoint, self.tls()
        except OSError as error:
            raise failed_precondition(
                "PEER_SECURITY", f"a file of peer_ca, peer_cert or peer_key cannot be used: {error}", target=endpoint
            ) from error


def require_url(backend: str, endpoint: str) -> str:
    """`spec.endpoint` as the URL of a server; INVALID_ARGUMENT if it is none."""
    try:
        parts, _ = urlsplit(endpoint), httpx.URL(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise invalid_argument("spec.endpoint", f"{backend} needs the URL of a server", value=endpoint)
    return endpoint


def read_object(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer, empty if it is none."""
    try:
        told = answer.json()
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
