"""The backend `verl-ray`: a server actor that verl's own trainer has started."""

from __future__ import annotations

from services.engine.cluster.actors import Cluster
from services.engine.cluster.verl import VerlSurface
from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import GuardedBackend
from services.runtime.clock import Clock


async def open_backend(spec: ReplicaSpec, cluster: Cluster, clock: Clock) -> GuardedBackend:
    """Attach to the actor that `spec.endpoint` names, such as `vllm_server_0_0`, or NAMESPACE/NAME."""
    surface = VerlSurface(await cluster.find(spec.endpoint))
    await surface.find_out()
    return GuardedBackend(spec, surface, clock)
