"""Where metrics are served: this service's own place and those that it knows of, for Prometheus' HTTP discovery.

Invariants: what is listed serves metrics over HTTP; a peer that does not answer, or does not say where, is left out and
keeps nobody waiting for longer than `ASK_S`. Peers are asked on the event loop that owns their channels.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.addresses import Address, AddressError, parse_address
from services.runtime.health import METRICS

ASK_S: Final = 2.0
"""Wall seconds that a peer has to answer."""

LIST_S: Final = 5.0
"""Wall seconds for the whole list; Prometheus gives up after ten."""

_WILDCARDS: Final = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """A place that serves metrics at /metrics."""

    url: str
    """http://HOST:PORT, or https://."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As Prometheus wants it."""
        scheme, _, address = self.url.partition("://")
        plain = scheme == "http"
        return {"targets": [address], "labels": {**self.labels, **({} if plain else {"__scheme__": scheme})}}


Source: TypeAlias = Callable[[], Awaitable[list[ScrapeTarget]]]


class Discovery:
    """The list of one service. Made on its event loop."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._sources: list[Source] = []
        self._loop = asyncio.get_running_loop()

    def add(self, source: Source) -> None:
        """List what `source` finds, too."""
        self._sources.append(source)

    async def targets(self, own: str) -> list[ScrapeTarget]:
        """The list; `own` is where this service was reached, as http://HOST:PORT."""
        found = await asyncio.gather(*(source() for source in self._sources))
        return [ScrapeTarget(own, {"service": self._service}), *(target for part in found for target in part)]

    def as_json(self, own: str) -> bytes:
        """The same for another thread. Raises TimeoutError, or RuntimeError once the loop is closed."""
        targets = asyncio.run_coroutine_threadsafe(self.targets(own), self._loop).result(LIST_S)
        return json.dumps([target.to_dict() for target in targets]).encode()


async def metrics_url(channel: grpc.aio.Channel, target: str) -> str | None:
    """Where the service behind `channel`, reached as `target`, serves metrics for others; None if it does not say.

    As http://HOST:PORT, or https://.
    """
    stub: Any = health_pb2_grpc.HealthStub(channel)
    call = stub.Check(health_pb2.HealthCheckRequest(), timeout=ASK_S)
    try:
        await call
        metadata = await call.trailing_metadata()
    except grpc.aio.AioRpcError:
        return None
    told = dict(metadata).get(METRICS)
    return None if told is None else as_reached(str(told), target)


def as_reached(told: str, target: str) -> str | None:
    """The place that a service told, seen from where `target` reaches it."""
    scheme, _, address = told.partition("://")
    try:
        metrics, reached = parse_address(address), parse_address(target)
    except AddressError:
        return None
    if metrics.host in _WILDCARDS:
        metrics = Address(reached.host or "127.0.0.1", metrics.port)
    # Loopback of another machine leads nowhere.
    return None if metrics.is_local and not reached.is_local else f"{scheme}://{metrics}"
