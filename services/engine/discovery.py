"""Where the replicas of a controller serve metrics: an HTTP engine itself, the others through their node's agent."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from services.engine.backends.agent import AgentBackend
from services.engine.domain.spec import ReplicaSpec
from services.engine.fleet import Fleet
from services.engine.slot import Slot
from services.runtime.discovery import ScrapeTarget

_PORTS = {"http": 80, "https": 443}


async def replicas_of(fleet: Fleet) -> list[ScrapeTarget]:
    """The replicas that serve metrics, hybrid and standalone; an agent once, with the replicas that it has."""
    slots = fleet.all
    addresses = await asyncio.gather(*(_agent_of(slot) for slot in slots))
    agents: dict[str, list[str]] = {}
    targets = []
    for slot, agent in zip(slots, addresses, strict=True):
        if agent is not None:
            agents.setdefault(agent, []).append(slot.replica_id)
        elif (target := engine_of(slot.replica.spec)) is not None:
            targets.append(target)
    # Without the ids in a label of its own a replica that moves would be a new series of all that its agent tells.
    targets += [
        ScrapeTarget(address, {"service": "agent", "__meta_turnout_replicas": ",".join(ids)})
        for address, ids in agents.items()
    ]
    return targets


async def _agent_of(slot: Slot) -> str | None:
    return await slot.backend.metrics_url() if isinstance(slot.backend, AgentBackend) else None


def engine_of(spec: ReplicaSpec) -> ScrapeTarget | None:
    """An engine that is reached over HTTP, as vLLM and SGLang, serves metrics of its own there."""
    try:
        url = urlsplit(spec.endpoint)
        port = url.port or _PORTS.get(url.scheme)
    except ValueError:
        # Only backends that connect to it judge an endpoint.
        return None
    if url.scheme not in _PORTS or url.hostname is None:
        return None
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    labels = {"service": "replica", "replica_id": spec.replica_id, "role": spec.role.value}
    return ScrapeTarget(f"{url.scheme}://{host}:{port}", labels)
