"""Where the peers of the open runs serve metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.runtime.discovery import MetricsPlace, ScrapeTarget
from services.scheduler.hosted import HostedRun
from services.scheduler.links import Links


class Peers:
    """The buffers and controllers of open runs, each once, however many runs it serves."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._places: dict[str, MetricsPlace] = {}

    async def targets(self, runs: Iterable[HostedRun]) -> list[ScrapeTarget]:
        """Those that say where they serve metrics."""
        services = {
            peer.target: service
            for hosted in runs
            if hosted.run.is_open
            for service, peer in (("buffer", hosted.buffer), ("engine", hosted.engine))
        }
        self._places = {target: self._places.get(target) or self._place(target) for target in services}
        urls = await asyncio.gather(*(place.url() for place in self._places.values()))
        found = zip(services.values(), urls, strict=True)
        return [ScrapeTarget(url, {"service": service}) for service, url in found if url is not None]

    def _place(self, target: str) -> MetricsPlace:
        return MetricsPlace(lambda: self._links.get("target", target).control, target)
