"""The backend `sglang-http`: an SGLang server that runs elsewhere, behind the same safety as vLLM."""

from __future__ import annotations

from urllib.parse import urlsplit

from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import GuardedBackend
from services.engine.sglang import http
from services.runtime.clock import Clock
from services.runtime.errors import invalid_argument


async def open_backend(spec: ReplicaSpec, clock: Clock) -> GuardedBackend:
    """Connect to the server that `spec.endpoint` names, an http or https URL."""
    parts = urlsplit(spec.endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise invalid_argument("spec.endpoint", "sglang-http needs the URL of a server", value=spec.endpoint)
    surface = await http.connect(spec.endpoint)
    try:
        return GuardedBackend(spec, surface, clock)
    except BaseException:
        await surface.close()
        raise
