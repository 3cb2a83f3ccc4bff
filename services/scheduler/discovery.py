"""Where the peers of the open runs serve metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.runtime.discovery import ScrapeTarget, metrics_url
from services.scheduler.hosted import HostedRun
from services.scheduler.links import Links


async def peers_of(runs: Iterable[HostedRun], links: Links) -> list[ScrapeTarget]:
    """The buffers and controllers that say where; each once, however many runs it serves."""
    peers = {
        peer.target: service
        for hosted in runs
        if hosted.run.is_open
        for service, peer in (("buffer", hosted.buffer), ("engine", hosted.engine))
    }
    asked = (metrics_url(links.get("target", target).control, target) for target in peers)
    urls = await asyncio.gather(*asked)
    services = zip(peers.values(), urls, strict=True)
    return [ScrapeTarget(url, {"service": service}) for service, url in services if url is not None]
