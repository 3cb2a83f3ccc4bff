"""Starts the engine of an actor."""

from __future__ import annotations

from typing import Any

from services.engine.guarded.surface import Surface
from services.engine.vllm import async_llm
from services.engine.vllm.config import VllmConfig


async def start_vllm(configuration: dict[str, Any]) -> Surface:
    """An AsyncLLM; the configuration is that of `VllmConfig`."""
    return await async_llm.start(VllmConfig.model_validate(configuration))
