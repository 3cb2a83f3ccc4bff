"""The backend `verl-ray`: a server actor that verl's own trainer has started.

Invariants: the counters only rise, and every token of a request that says whose it is comes into them once: while it
runs as it is read in the server, and the rest by the note that its client leaves there when it has ended. A note that
is lost (its worker died, or thousands ended between two readings) costs what was made since the last reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from services.engine.backends.base import EngineProgress, ForeignRequest
from services.engine.cluster.actors import Cluster
from services.engine.cluster.verl import VerlSurface
from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import GuardedBackend
from services.runtime.clock import Clock

GONE: Final = 4096
"""Requests that are remembered after they were last read, for the notes of their ends to come."""


class Tally:
    """Tokens of requests that are read now and then, and whose ends are told."""

    def __init__(self) -> None:
        self.decoded = self.prefilled = 0
        self._made: dict[str, int] = {}

    def take(self, present: Sequence[ForeignRequest], ended: Sequence[ForeignRequest]) -> None:
        """Take in a reading, and what has ended since the one before."""
        for request in (*present, *ended):
            self._count(request)
        for request in ended:
            self._made.pop(request.request_id, None)
        # What was just counted comes last, so the others go first, the longest unseen before.
        for name in list(islice(self._made, max(0, len(self._made) - len(present) - GONE))):
            del self._made[name]

    def _count(self, request: ForeignRequest) -> None:
        before = self._made.pop(request.request_id, None)
        # What it had made before it came here was prefilled with its prompt, and is told by its id.
        self.decoded += max(0, request.output_tokens - (request.made_before if before is None else before))
        self.prefilled += request.prompt_tokens + request.made_before if before is None else 0
        self._made[request.request_id] = request.output_tokens


class VerlBackend(GuardedBackend):
    """Its requests come from verl's own clients, and are read in the server."""

    def __init__(self, spec: ReplicaSpec, surface: VerlSurface, clock: Clock) -> None:
        super().__init__(spec, surface, clock)
        self._server = surface
        self._tally = Tally()
        self._last_note = 0
        self._reading = asyncio.Lock()

    async def progress(self) -> EngineProgress:
        # Readings are taken in as they were made: an older one after a newer would count backwards.
        async with self._reading:
            own = await super().progress()
            found = await self._server.requests(self._last_note)
            self._last_note = found.last_note
            self._tally.take(found.present, found.ended)
        return replace(
            own,
            foreign=found.present,
            decoded_tokens=own.decoded_tokens + self._tally.decoded,
            prefilled_tokens=own.prefilled_tokens + self._tally.prefilled,
            # One of ours may still be on its way to the engine.
            running=max(0, own.running + found.count - len(own.output_tokens)),
        )


async def open_backend(spec: ReplicaSpec, cluster: Cluster, clock: Clock) -> VerlBackend:
    """Attach to the actor that `spec.endpoint` names, such as `vllm_server_0_0`, or NAMESPACE/NAME."""
    surface = VerlSurface(await cluster.find(spec.endpoint))
    await surface.find_out()
    return VerlBackend(spec, surface, clock)
