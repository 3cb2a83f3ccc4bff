"""The backend `vllm-inproc`: an AsyncLLM in the process of the controller or agent."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import GuardedBackend
from services.engine.vllm import async_llm
from services.engine.vllm.config import VllmConfig
from services.runtime.clock import Clock
from services.runtime.errors import failed_precondition, invalid_argument


async def open_backend(spec: ReplicaSpec, path: Path | None, clock: Clock) -> GuardedBackend:
    """Start an engine from a YAML file; the caller names the replica, whoever started the service the model."""
    if path is None:
        raise failed_precondition("NOT_CONFIGURED", "this service was started without vllm_config")
    if spec.endpoint:
        raise invalid_argument("spec.endpoint", "an engine of this process has no endpoint", value=spec.endpoint)
    if importlib.util.find_spec("vllm") is None:
        raise failed_precondition("VLLM_MISSING", "vllm is not installed beside this service")
    try:
        config = VllmConfig.load(path)
    except ValueError as error:
        raise failed_precondition("BAD_VLLM_CONFIG", str(error)) from error
    surface = await async_llm.start(config)
    try:
        return GuardedBackend(spec, surface, clock, None if config.spool is None else str(config.spool))
    except BaseException:
        await surface.close()
        raise
