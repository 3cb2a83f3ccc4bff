"""verl's agent loop manager and worker, which feed the index: the manager adds prompts, the workers report them.

Set by `actor_rollout_ref.rollout.agent.agent_loop_manager_class`. Invariants: everything goes to TransferQueue as
before, by verl's own code; a prompt is in the index before a worker gets it; the token of its claim travels with it and
is taken out before any agent loop sees the prompt.
"""

from __future__ import annotations

import contextvars
from typing import Any, Final

import ray
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils

from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient
from turnout.integrations.verl import _queue
from turnout.integrations.verl._index import Index
from turnout.integrations.verl._reports import GroupReport
from turnout.integrations.verl._requests import REQUEST, RequestKey
from turnout.integrations.verl._setup import VerlSetup

CLAIM: Final = "turnout_claim"
"""Column of a prompt with the id and the attempt of its claim."""

_report: contextvars.ContextVar[GroupReport] = contextvars.ContextVar("turnout_report")


def setup_of(config: Any) -> VerlSetup:
    """The settings in verl's configuration. Raises ValueError naming one that is wrong."""
    setup = VerlSetup.read(config.trainer.v1.sampler.get("sampler_kwargs") or {})
    setup.check_filter(config.algorithm)
    return setup


class AgentLoopWorkerBase(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, telling the buffer how its groups end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turnout = setup_of(self.config)
        self._buffer = AsyncBufferClient(self._turnout.buffer)

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, trajectory: dict[str, Any], **kwargs: Any) -> None:
        validate = trajectory["validate"]
        claim_id, _, attempt = prompt.pop(CLAIM).rpartition("/")
        rollout = self.config.actor_rollout_ref.rollout
        report = GroupReport(
            self._buffer,
            {"run_id": self._turnout.run_id, "partition": _queue.VALIDATION if validate else _queue.TRAIN},
            buffer_pb2.ClaimToken(claim_id=claim_id, attempt=int(attempt)),
            prompt["uid"],
            prompt.get("__rollout_n__", rollout.val_kwargs.n if validate else rollout.n),
        )
        # The tasks of the sessions begin with a copy of this context.
        _report.set(report)
        await super()._run_prompt(prompt, *args, trajectory=trajectory, **kwargs)
        await report.close()

    async def _run_agent_loop(self, *args: Any, trajectory: dict[str, Any], **kwargs: Any) -> None:
        partition = _queue.VALIDATION if trajectory["validate"] else _queue.TRAIN
        REQUEST.set(RequestKey(partition, kwargs["uid"], kwargs["session_id"]))
        try:
            await super()._run_agent_loop(*args, trajectory=trajectory, **kwargs)
        except BaseException as error:
            _report.get().failed(error)
            raise

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        made = output if isinstance(output, list) else [output]
        metric = None if validate else self._turnout.filter_groups_metric
        outputs = [
            _queue.output(
                {
                    "prompt_len": len(each.prompt_ids),
                    "response_len": len(each.response_ids),
                    "min_global_steps": each.extra_fields.get("min_global_steps"),
                    "max_global_steps": each.extra_fields.get("max_global_steps"),
                },
                _rewards(each, metric),
            )
            for each in made
            if each.response_ids
        ]
        await _report.get().finished(kwargs["session_id"], outputs)


AgentLoopWorker = ray.remote(AgentLoopWorkerBase)


def _rewards(output: Any, metric: str | None) -> dict[str, float]:
    if metric is None:
        return {}
    info = output.extra_fields.get("reward_extra_info") or {}
    value = output.reward_score if metric == _queue.CANONICAL else info.get(metric)
    return {} if value is None else {metric: float(value)}


class AgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, adding prompts to the index before it hands them out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = AgentLoopWorker
        self._index = Index.of(setup_of(self.config).run_id)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Add a batch of prompts, then dispatch it without waiting for results."""
        index = self._index
        index.start()
        validate = bool(tensordict_utils.get(prompts, "validate", False))
        rollout = self.config.actor_rollout_ref.rollout
        uids = [str(uid) for uid in prompts["uid"]]
        default = rollout.val_kwargs.n if validate else rollout.n
        sizes = list(prompts["__rollout_n__"]) if "__rollout_n__" in prompts else [default] * len(uids)
        tokens = index.add(
            _queue.VALIDATION if validate else _queue.TRAIN,
            int(tensordict_utils.get(prompts, "global_steps")),
            [(uid, int(size)) for uid, size in zip(uids, sizes, strict=True)],
        )
        tensordict_utils.assign_non_tensor_stack(
            prompts, CLAIM, [f"{tokens[uid].claim_id}/{tokens[uid].attempt}" for uid in uids]
        )
        super().generate_sequences(prompts)
