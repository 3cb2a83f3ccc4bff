"""Where metrics are served: this service's own place and those that it knows of, for Prometheus' HTTP discovery.

Invariants: what is listed serves metrics over HTTP, or did so before it went away; a peer that never answered is left
out, and one that does not answer keeps nobody waiting for longer than `ASK_S`. Peers are asked on the event loop that
owns their channels.
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
from services.runtime.loop_calls import call_on

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
        targets = call_on(self._loop, lambda: self.targets(own), LIST_S)
        return json.dumps([target.to_dict() for target in targets]).encode()


class MetricsPlace:
    """Where one peer serves its metrics, as it tells by its health.

    While it is away the last that it told counts: a target that leaves the list raises no alarm.
    """

    def __init__(self, channel: Callable[[], grpc.aio.Channel], target: str) -> None:
        """`channel` reaches it as `target`; it may be another one each time."""
        self._channel = channel
        self._target = target
        self._last: str | None = None

    async def url(self) -> str | None:
        """The place, for others than itself, as http://HOST:PORT or https://; None if it never said."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel())
        call = stub.Check(health_pb2.HealthCheckRequest(), timeout=ASK_S)
        try:
            await call
            told = dict(await call.trailing_metadata()).get(METRICS)
        except grpc.aio.AioRpcError:
            return self._last
        self._last = None if told is None else as_reached(str(told), self._target)
        return self._last


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
