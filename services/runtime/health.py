"""grpc.health.v1: whether the service can be used now.

Invariants: it is SERVING only between the end of its start and the beginning of its stop, and while nothing it depends
on has reported otherwise; a name that nobody offers is NOT_FOUND for Check and SERVICE_UNKNOWN for Watch; Watch streams
end when the service drains, after they have said NOT_SERVING.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.draining import Draining
from services.runtime.errors import not_found

Response = health_pb2.HealthCheckResponse

CLOCK: Final = "turnout-clock"
"""Trailing metadata of Check: unix seconds of the service's clock."""

VERSION: Final = "turnout-version"
"""The same: version of the service."""

METRICS: Final = "turnout-metrics"
"""The same: where it serves its metrics, as http://HOST:PORT or https://; absent if it does not."""


class Health(health_pb2_grpc.HealthServicer):
    """The health of one server: "" stands for the whole, the other names for its services and their parts."""

    SERVING = Response.SERVING

    def __init__(self, draining: Draining) -> None:
        self._draining = draining
        self._names = {""}
        self._parts: dict[str, bool] = {}
        self._serving = False
        self._changed = asyncio.Event()
        self.facts: dict[str, str] = {}
        """What Check tells beside the health, as trailing metadata."""

    def add(self, names: Iterable[str]) -> None:
        """Answer for these services too."""
        self._names.update(names)

    def set_serving(self, serving: bool) -> None:
        """Say whether the service can be used. While it drains it cannot, whatever is said here."""
        if serving != self._serving:
            self._serving = serving
            self._tell()

    def set_parts(self, parts: Mapping[str, bool]) -> None:
        """Name what the service depends on, and whether each can be used; those named before are forgotten."""
        if parts != self._parts:
            self._parts = dict(parts)
            self._tell()

    def _tell(self) -> None:
        # Whoever waits holds this event; the next ones wait on a new one.
        self._changed.set()
        self._changed = asyncio.Event()

    def status(self, service: str) -> int:
        """Return the ServingStatus of a service by its full name."""
        if service in self._names:
            usable = self._serving
        elif service in self._parts:
            usable = self._parts[service]
        else:
            return Response.SERVICE_UNKNOWN
        return Response.SERVING if usable and not self._draining.is_set else Response.NOT_SERVING

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Response:
        status = self.status(request.service)
        if status == Response.SERVICE_UNKNOWN:
            raise not_found("SERVICE_NOT_FOUND", "this server offers no such service", service=request.service)
        context.set_trailing_metadata(((CLOCK, f"{time.time():.6f}"), *self.facts.items()))
        return Response(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Response]:
        told: int | None = None
        while True:
            changed = self._changed
            status = self.status(request.service)
            if status != told:
                told = status
                yield Response(status=status)
            if self._draining.is_set:
                return
            await self._wait(changed)

    async def _wait(self, changed: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(self._draining.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
