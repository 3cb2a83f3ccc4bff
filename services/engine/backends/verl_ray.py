"""The backend `verl-ray`: a server actor that verl's own trainer has started.

Invariant: the counters only rise. Tokens that a request made after the last reading before it ended are in none.
"""

from __future__ import annotations

from dataclasses import replace

from services.engine.backends.base import EngineProgress
from services.engine.cluster.actors import Cluster
from services.engine.cluster.verl import VerlSurface
from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import GuardedBackend
from services.runtime.clock import Clock


class VerlBackend(GuardedBackend):
    """Its requests come from verl's own clients, and are read in the server."""

    def __init__(self, spec: ReplicaSpec, surface: VerlSurface, clock: Clock) -> None:
        super().__init__(spec, surface, clock)
        self._server = surface
        self._made: dict[str, int] = {}
        self._decoded = self._prefilled = 0

    async def progress(self) -> EngineProgress:
        own = await super().progress()
        count, requests = await self._server.requests()
        foreign = tuple(request for request in requests if request.request_id not in own.output_tokens)
        now = {request.request_id: request.output_tokens for request in foreign}
        for request in foreign:
            before = self._made.get(request.request_id)
            # What it had made before it came here was prefilled with its prompt, and is told by its id.
            self._decoded += request.output_tokens - (request.made_before if before is None else before)
            self._prefilled += request.prompt_tokens + request.made_before if before is None else 0
        self._made = now
        return replace(
            own,
            foreign=foreign,
            decoded_tokens=own.decoded_tokens + self._decoded,
            prefilled_tokens=own.prefilled_tokens + self._prefilled,
            # One of ours may still be on its way to the engine.
            running=max(0, own.running + count - len(own.output_tokens)),
        )


async def open_backend(spec: ReplicaSpec, cluster: Cluster, clock: Clock) -> VerlBackend:
    """Attach to the actor that `spec.endpoint` names, such as `vllm_server_0_0`, or NAMESPACE/NAME."""
    surface = VerlSurface(await cluster.find(spec.endpoint))
    await surface.find_out()
    return VerlBackend(spec, surface, clock)
