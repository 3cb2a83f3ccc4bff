"""Agent loops of the trainer's tests: verl's worker, whose model and processor are not there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import ray
import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from tests.verl.adapter.cpu import TOKENS
from turnout.client import AsyncBufferClient
from turnout.integrations.verl._agent_loop import AgentLoopManager, AgentLoopWorkerBase, setup_of


class Paced:
    """An agent loop of one turn, which begins when the gate of its step opens."""

    def __init__(self, server_manager: Any, **_: Any) -> None:
        self._client = server_manager

    async def _wait(self, kwargs: dict[str, Any]) -> None:
        if not kwargs["uid"].startswith("v"):
            await ray.get_actor("gate").passed.remote(kwargs["global_steps"])

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        await self._wait(kwargs)
        made = await self._client.generate(
            request_id=f"{kwargs['uid']}-{kwargs['session_id']}",
            prompt_ids=[1, 2, 3],
            sampling_params={"max_tokens": TOKENS},
        )
        return AgentLoopOutput(
            prompt_ids=[1, 2, 3],
            response_ids=made.token_ids,
            response_mask=[1] * len(made.token_ids),
            reward_score=float(kwargs["session_id"]),
            metrics=AgentLoopMetrics(),
            extra_fields=dict(made.extra_fields),
        )


class Broken(Paced):
    """The same, and its tool is gone."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        await self._wait(kwargs)
        raise RuntimeError("the tool is gone")


class NoModel:
    """Goes before a worker's class."""

    def __init__(self, config: Any, llm_client: Any, *_: Any) -> None:
        self.prepare(config, llm_client)
        tq.init()

    def prepare(self, config: Any, llm_client: Any) -> None:
        """Everything but the connection to TransferQueue."""
        self.config, self.llm_client = config, llm_client
        self.tokenizer = self.processor = self.mm_processor_kwargs = self.hf_model_type = None
        self.dataset_cls = SimpleNamespace
        self.tools: list[Any] = []
        self.reward_loop_worker_handles, self.distillation_enabled = None, False
        # A name of this module would be a copy of the registry where the module came by value.
        from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

        # Agent loops are found by their module, and this one is nowhere in a worker.
        sys.modules["paced"] = cast(ModuleType, SimpleNamespace(Paced=Paced, Broken=Broken))
        _agent_loop_registry["paced"] = {"_target_": "paced.Paced"}
        _agent_loop_registry["broken"] = {"_target_": "paced.Broken"}
        self.background_tasks: set[Any] = set()

    def _compute_multi_modal_inputs(self, output: Any, input_ids: Any) -> dict[str, Any]:
        return {}

    def _compute_position_ids(self, input_ids: Any, *_: Any) -> Any:
        return torch.arange(input_ids.shape[-1]).unsqueeze(0)

    async def _compute_score(self, outputs: Any, kwargs: Any) -> None: ...

    async def _compute_teacher_logprobs(self, *_: Any, **__: Any) -> None: ...


class VerlWorker(NoModel, AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's worker as it is."""


class TurnoutWorker(NoModel, AgentLoopWorkerBase):
    """The adapter's."""

    def prepare(self, config: Any, llm_client: Any) -> None:
        super().prepare(config, llm_client)
        self._turnout = setup_of(self.config)
        self._buffer = AsyncBufferClient(self._turnout.buffer)


class VerlLoops(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager as it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(num_cpus=0)(VerlWorker)


class TurnoutLoops(AgentLoopManager):
    """The adapter's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(num_cpus=0)(TurnoutWorker)
