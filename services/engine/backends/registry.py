"""Which backends this service has.

Invariant: a spec that names an unknown backend or option is refused before anything is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from services.engine.backends import sglang_http, verl_ray, vllm_http, vllm_inproc, vllm_ray
from services.engine.backends.agent import Agents
from services.engine.backends.base import Backend
from services.engine.cluster.actors import Cluster
from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.http import HttpPeers
from services.engine.reference.decode import Curve
from services.engine.reference.engine import EngineConfig, ReferenceEngine
from services.engine.reference.model import LengthLaw, PseudoModel
from services.engine.settings import EngineSettings
from services.runtime.clock import Clock
from services.runtime.errors import invalid_argument

BACKENDS = ("agent", "reference", "sglang-http", "verl-ray", "vllm-http", "vllm-inproc", "vllm-ray")

OPTIONS: Final = {"vllm-ray": vllm_ray.OPTIONS}
"""What a spec may say beside its fields."""


class Backends:
    """Opens the engine of a replica."""

    def __init__(self, settings: EngineSettings, clock: Clock, run_id: Callable[[], str], cluster: Cluster) -> None:
        self._clock = clock
        self._cluster = cluster
        dialer = settings.dialer()
        self._agents = Agents(run_id, dialer)
        self._http = HttpPeers(dialer, settings.peer_context)
        self._config = reference_config(settings)
        self._vllm_config = settings.vllm_config

    async def open(self, spec: ReplicaSpec) -> Backend:
        """The engine of a replica; INVALID_ARGUMENT / UNKNOWN_BACKEND or UNKNOWN_OPTION names what is wrong."""
        if spec.backend not in BACKENDS:
            raise invalid_argument(
                "spec.backend",
                f"no backend {spec.backend!r}; this service has {', '.join(BACKENDS)}",
                value=spec.backend,
                reason="UNKNOWN_BACKEND",
            )
        for name in sorted(spec.options.keys() - OPTIONS.get(spec.backend, frozenset())):
            raise invalid_argument(
                "spec.options", f"backend {spec.backend} has no option {name!r}", value=name, reason="UNKNOWN_OPTION"
            )
        match spec.backend:
            case "agent":
                return await self._agents.open(spec)
            case "sglang-http":
                return await sglang_http.open_backend(spec, self._clock, self._http)
            case "verl-ray":
                return await verl_ray.open_backend(spec, self._cluster, self._clock)
            case "vllm-http":
                return await vllm_http.open_backend(spec, self._clock, self._http)
            case "vllm-inproc":
                return await vllm_inproc.open_backend(spec, self._vllm_config, self._clock)
            case "vllm-ray":
                return await vllm_ray.open_backend(spec, self._vllm_config, self._cluster, self._clock)
            case _:
                return ReferenceEngine(spec, self._config, self._clock)


def reference_config(settings: EngineSettings) -> EngineConfig:
    """How the reference engine is configured."""
    return EngineConfig(
        model=PseudoModel(
            LengthLaw(settings.length_mean, settings.length_log_std, settings.length_between_prompts),
            settings.vocabulary,
        ),
        curve=Curve(settings.decode_base, settings.decode_per_request, settings.prefill_rate),
        weights_bytes=settings.weights_bytes,
        kv_bytes=settings.kv_bytes,
        sleep_seconds=settings.sleep_seconds,
        wake_seconds=settings.wake_seconds,
        load_seconds=settings.load_seconds,
    )
