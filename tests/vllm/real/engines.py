"""Real engines for tests, and what is asked of them over and over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.engine.backends.base import EngineOutput, EngineRequest
from services.engine.domain.requests import Finish, Sampling
from services.engine.domain.spec import ReplicaSpec, Role
from services.engine.domain.tokens import Stretches
from services.engine.guarded.backend import GuardedBackend
from services.engine.vllm import async_llm
from services.engine.vllm.async_llm import AsyncLlmSurface
from services.engine.vllm.config import VllmConfig
from services.runtime.clock import MonotonicClock
from services.runtime.errors import TurnoutError

KV_BYTES = 512 << 20
PROMPT = (5, 6, 7)
LONG = 1000
"""Tokens that take seconds, which is what a test has that acts before they are all there."""

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def engine_args(kv_bytes: int = KV_BYTES) -> dict[str, Any]:
    """Arguments of a tiny engine."""
    return {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": kv_bytes,
        "gpu_memory_utilization": 0.1,
    }


def config(model: Path, kv_bytes: int = KV_BYTES) -> VllmConfig:
    """The configuration of a tiny engine."""
    return VllmConfig(model=str(model), cpu=True, engine_args=engine_args(kv_bytes), environment=ENVIRONMENT)


async def start_engine(model: Path, kv_bytes: int = KV_BYTES) -> AsyncLlmSurface:
    """Start an engine in this process."""
    return await async_llm.start(config(model, kv_bytes))


async def restore(surface: AsyncLlmSurface, models: Path) -> None:
    """Bring an engine back to where it started, by its own calls."""
    await surface.engine.abort(list(surface.engine.output_processor.request_states), internal=True)
    if await surface.engine.is_sleeping():
        await surface.engine.wake_up()
        await surface.engine.resume_generation()
    await surface.collective_rpc("reload_weights", (), {"weights_path": str(models / "old" / "tiny-llama")})
    await surface.engine.update_weight_version("default")
    await surface.engine.reset_prefix_cache(reset_running_requests=True)


@dataclass
class Output:
    """What a request gave."""

    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None
    versions: list[int | None]
    error: TurnoutError | None = None


class Engine:
    """A backend, and the surface below it."""

    def __init__(self, backend: GuardedBackend, surface: Any) -> None:
        self.backend = backend
        self.surface = surface
        self.raw: Any = getattr(surface, "engine", None)
        self.processes: list[int] = []
        self._count = 0

    @classmethod
    def on(cls, surface: AsyncLlmSurface) -> Engine:
        """A fresh backend."""
        spec = ReplicaSpec("r", Role.HYBRID, "vllm-inproc")
        return cls(GuardedBackend(spec, surface, MonotonicClock()), surface)

    async def generate(self, tokens: int = 20, request_id: str = "", **fields: Any) -> Output:
        """Generate greedily and read to the end, or to the error."""
        return await self.read(self.request(tokens, request_id, **fields))

    async def read(self, request: EngineRequest) -> Output:
        """Read the output of a request to its end, or to its error."""
        output = Output([], [], None, [])
        try:
            async for part in self.backend.generate(request):
                self._add(output, part)
        except TurnoutError as error:
            output.error = error
        return output

    @staticmethod
    def _add(output: Output, part: EngineOutput) -> None:
        output.tokens += part.token_ids
        output.logprobs += part.logprobs
        output.finish = part.finish
        output.versions.append(part.weight_version)

    def request(
        self,
        tokens: int = 20,
        request_id: str = "",
        *,
        prompt: Sequence[int] = PROMPT,
        so_far: Sequence[int] = (),
        temperature: float = 0.0,
        delta_tokens: int = 1,
        seed: int = 0,
    ) -> EngineRequest:
        """A request; it has an id of its own unless one is given."""
        self._count += 1
        return EngineRequest(
            request_id or f"request-{self._count}",
            prompt,
            Stretches([so_far]),
            tokens,
            Sampling(temperature=temperature, logprobs=True, seed=seed),
            delta_tokens=delta_tokens,
        )

    async def begin(self, tokens: int = LONG, request_id: str = "") -> asyncio.Task[Output]:
        """Start a request and return once it decodes, itself and not another one."""
        request = self.request(tokens, request_id)
        task = asyncio.create_task(self.read(request))
        async with asyncio.timeout(30):
            while not (await self.backend.progress()).output_tokens.get(request.request_id):
                assert not task.done(), task.result()
                await asyncio.sleep(0.005)
        return task


def weights_file(models: Path) -> Path:
    """The new weights."""
    return models / "new" / "tiny-llama" / "model.safetensors"


def greedy(model: Path, tokens: int = 20) -> list[int]:
    """What a model computes in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.no_grad():
        output = loaded.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in output[0, len(PROMPT) :]]


async def refused(call: Any, code: str, reason: str) -> TurnoutError:
    """Check that a call fails in this way."""
    with pytest.raises(TurnoutError) as caught:
        await call
    assert (caught.value.code.name, caught.value.reason) == (code, reason), caught.value
    return caught.value
