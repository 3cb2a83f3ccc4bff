"""The backend `vllm-http`: a vLLM API server that runs elsewhere."""

from __future__ import annotations

from urllib.parse import urlsplit

from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import GuardedBackend
from services.engine.vllm import http
from services.runtime.clock import Clock
from services.runtime.errors import invalid_argument


async def open_backend(spec: ReplicaSpec, clock: Clock) -> GuardedBackend:
    """Connect to the server that `spec.endpoint` names, an http or https URL."""
    parts = urlsplit(spec.endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise invalid_argument(
            "spec.endpoint", "the backend vllm-http needs the URL of an API server", value=spec.endpoint
        )
    surface = await http.connect(spec.endpoint)
    try:
        return GuardedBackend(spec, surface, clock)
    except BaseException:
        await surface.close()
        raise
