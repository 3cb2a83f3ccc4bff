"""The backend `sglang-http`: an SGLang server that runs elsewhere, behind the same safety as vLLM."""

from __future__ import annotations

from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import GuardedBackend
from services.engine.guarded.http import HttpPeers
from services.engine.sglang import http
from services.runtime.clock import Clock


async def open_backend(spec: ReplicaSpec, clock: Clock, peers: HttpPeers) -> GuardedBackend:
    """Connect to the server that `spec.endpoint` names, an http or https URL, if `peers` may call it."""
    url, tls = peers.reach("sglang-http", spec.endpoint)
    surface = await http.connect(url, tls=tls)
    try:
        return GuardedBackend(spec, surface, clock)
    except BaseException:
        await surface.close()
        raise
