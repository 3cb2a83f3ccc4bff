"""verl's trainer without a GPU: what needs one is replaced where verl lets others be put in.

Real: the trainer's class with its hooks, `fit`, `step`, `_setup`, checkpoints, TransferQueue, data loader, agent loop
manager and worker, server client and balancer, `RolloutReplica`, `CheckpointEngineManager`, and the actor worker's
`update_weights`. Stood in for: vLLM inside its server actor, worker groups, resource pools, model, tokenizer, reward
manager, the transport of the weights, and the computations of a training step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.trainer.ppo.v1.trainer_base import tu
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode, RolloutReplica
from verl.workers.rollout.router import get_router_handle

from tests.verl.adapter.actors import Gate, Server
from turnout.buffer.v1 import buffer_pb2

GROUPS, MINI, N, VAL = 8, 4, 2, 4
HYBRIDS, STANDALONES = 2, 1
TOKENS = 20
TRANSPORT = "stand-in"


@CheckpointEngineRegistry.register(TRANSPORT)
class Transport(CheckpointEngine):
    """A transport that has nothing to move."""

    @classmethod
    def build_topology(cls, *_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}


Transport.__abstractmethods__ = frozenset()


class Replica(RolloutReplica):
    """verl's replica over our server actors."""

    def __init__(self, rank: int, config: Any, hybrid: bool) -> None:
        self.replica_rank, self.config = rank, SimpleNamespace(free_cache_engine=config.free_cache_engine)
        self.rollout_mode = RolloutMode.HYBRID if hybrid else RolloutMode.STANDALONE
        actor = ray.remote(num_cpus=0)(Server).options(name=f"vllm_server_{rank}_0", max_concurrency=1000)
        self._server_handle = actor.remote(rank, hybrid)
        # The workers that receive weights are not there; what they tell the server is told to it directly.
        self.servers = self.workers = [self._server_handle]
        self._server_address = f"10.0.0.{rank}:8000"

    async def launch_servers(self) -> None:
        """They run."""


class Servers(LLMServerManager):
    """verl's manager with replicas that need no GPU."""

    @classmethod
    def create(cls, config: Any, worker_group: Any = None, start_rank: int = 0, **_: Any) -> Servers:
        manager = object.__new__(cls)
        rollout = config.actor_rollout_ref.rollout
        hybrid = worker_group is not None
        ranks = range(start_rank, start_rank + (HYBRIDS if hybrid else STANDALONES))
        manager.config, manager.rollout_config = config, rollout
        manager.rollout_replicas = [Replica(rank, rollout, hybrid) for rank in ranks]
        manager.server_handles = [replica._server_handle for replica in manager.rollout_replicas]
        manager.server_addresses = [replica._server_address for replica in manager.rollout_replicas]
        manager.global_load_balancer = None
        if hybrid:
            worker_group.rollout_servers = manager.server_handles
        else:
            servers = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
            manager.global_load_balancer = get_router_handle(servers=servers)
        return manager


class Rollout:
    """`ServerAdapter` of the actor worker: the engine on its own GPUs."""

    sleep_level = 2

    def __init__(self, servers: list[Any]) -> None:
        self._servers = servers

    async def resume(self, tags: list[str]) -> None:
        await asyncio.gather(*(server.wake_up.remote(tags=tags) for server in self._servers))

    async def update_weights(self, weights: Any, *, global_steps: int, **_: Any) -> None:
        for server in self._servers:
            await server.clear_kv_cache.remote()
            await server.set_global_steps.remote(global_steps)


@dataclass(frozen=True)
class Saved:
    """A save that has begun: whether the manifest was there, and what verl's marker file said."""

    folder: str
    manifest: bool
    marker: str


class Group:
    """The trainer's worker group: one worker of the class that the trainer chose, without its model."""

    world_size = 1

    def __init__(self, ray_cls_with_init: Any, **_: Any) -> None:
        self._classes = ray_cls_with_init
        self.rollout_servers: list[Any] = []
        self.saved: list[Saved] = []
        self.loaded = ""

    def spawn(self, prefix_set: Any) -> dict[str, Group]:
        (self._class,) = (each.cls.__ray_metadata__.modified_class for each in self._classes.values())
        return dict.fromkeys(prefix_set, self)

    def init_model(self) -> None: ...

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        folder = Path(path).parent
        marker = folder.parent / "latest_checkpointed_iteration.txt"
        last = marker.read_text() if marker.exists() else ""
        self.saved.append(Saved(folder.name, (folder / "turnout.json").exists(), last))

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        self.loaded = local_path

    def execute_checkpoint_engine(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        """verl's own method, or the adapter's, in a loop of its own."""
        worker = object.__new__(self._class)

        async def sent(*_: Any, **__: Any) -> dict[str, Any]:
            return {"sync/bytes": 1.0}

        worker.__dict__.update(
            config=OmegaConf.create({"rollout": {"name": "vllm", "free_cache_engine": True}}),
            rollout=Rollout(self.rollout_servers),
            actor=SimpleNamespace(
                engine=SimpleNamespace(
                    get_per_tensor_param=lambda **_: (iter(()), None), is_param_offload_enabled=False
                )
            ),
            checkpoint_engine=SimpleNamespace(send_weights=sent),
            peft_merge=False,
            layered_summon=False,
            base_sync_done=True,
        )
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(asyncio.run(worker.update_weights(global_steps=global_steps, mode=mode)))
        )
        thread.start()
        thread.join()
        return [ray.put(answer) for answer in answers]


class Receivers:
    """The workers of the replicas that receive weights."""

    def __init__(self, worker_handles: list[Any], **_: Any) -> None:
        self._servers = worker_handles
        self.world_size = len(worker_handles)

    def execute_checkpoint_engine(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def update_weights(self, global_steps: int) -> list[Any]:
        ray.get([server.clear_kv_cache.remote() for server in self._servers])
        return [server.set_global_steps.remote(global_steps) for server in self._servers]


class Pools:
    """Resource pools without resources."""

    def __init__(self, resource_pool_spec: dict[str, Any], mapping: dict[Any, str]) -> None:
        self._mapping = mapping
        self.resource_pool_dict = {name: name for name in resource_pool_spec}

    def create_resource_pool(self) -> None: ...

    def get_resource_pool(self, role: Any) -> str:
        return self.resource_pool_dict[self._mapping[role]]

    def get_n_gpus(self) -> int:
        return HYBRIDS


def install(monkeypatch: Any) -> None:
    """Put the stand-ins where verl's modules look for what they replace."""
    import verl.checkpoint_engine.base as engine
    import verl.trainer.ppo.v1.trainer_base as base
    import verl.trainer.ppo.v1.trainer_separate_async as separate
    import verl.workers.engine_workers as workers

    monkeypatch.setattr(base, "create_colocated_worker_cls", lambda class_dict: class_dict)
    monkeypatch.setattr(base, "RayWorkerGroup", Group)
    monkeypatch.setattr(base, "ResourcePoolManager", Pools)
    monkeypatch.setattr(base, "LLMServerManager", Servers)
    monkeypatch.setattr(separate, "LLMServerManager", Servers)
    monkeypatch.setattr(base, "RewardLoopManager", lambda **_: SimpleNamespace(reward_loop_worker_handles=()))
    monkeypatch.setattr(engine, "RayWorkerGroup", Receivers)
    nothing = SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(workers, "get_torch_device", lambda: nothing)
    monkeypatch.setattr(workers, "set_expandable_segments", lambda _: None)
    monkeypatch.setattr(workers, "log_gpu_memory_usage", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)


def rows(count: int, broken: Set[int] = frozenset()) -> list[dict[str, Any]]:
    """Prompts as verl's dataset has them; of the broken ones every session fails."""
    return [
        {
            "raw_prompt": [{"role": "user", "content": str(number)}],
            "index": number,
            "agent_name": "broken" if number in broken else "paced",
        }
        for number in range(count)
    ]


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: [item[name] for item in items] for name in items[0]}


class OnCpu:
    """Goes before a trainer's class."""

    # Of the trainer.
    config: Any
    global_steps: int
    current_mode: Any
    replay_buffer: Any
    agent_loop_manager: Any
    gate: Any
    killed_at: int | None = None
    slow: frozenset[int] = frozenset()
    """Steps whose prompts are answered only once the GPUs are lent, or the next step begins."""
    broken: frozenset[int] = frozenset()
    """Prompts that fail, by their number."""

    def _init_tokenizer(self) -> None:
        self.tokenizer = self.processor = None

    def _init_dataloader(self) -> None:
        self.train_dataloader = StatefulDataLoader(
            rows(1000, self.broken), batch_size=1, collate_fn=collate, num_workers=0
        )
        self.val_dataloader = rows(VAL)
        self.train_dataloader_it = None
        with_generation = OmegaConf.create({"gen_batch_size": 1})
        OmegaConf.set_struct(self.config, False)
        self.config.data = OmegaConf.merge(self.config.data, with_generation)
        self.steps_per_epoch = 1000 // GROUPS
        self.total_training_steps = self.config.trainer.total_training_steps
        self.seen: list[dict[str, Any]] = []
        self.modes: list[str] = []
        self.refills: list[tuple[int, int]] = []
        """Thread and number of prompts of each."""

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        count: int = super()._submit_batch_to_rollout(batch)  # type: ignore[misc]
        if self.global_steps not in self.slow:
            ray.get(self.gate.open.remote(self.global_steps))
        return count

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        self.refills.append((threading.get_ident(), num_prompts))
        count: int = super()._add_prompts_to_generate(num_prompts)  # type: ignore[misc]
        return count

    def on_step_begin(self) -> None:
        super().on_step_begin()  # type: ignore[misc]
        self.modes.append(f"{self.global_steps} {self.current_mode.value}")
        ray.get(self.gate.open.remote(self.global_steps - 1))

    def on_step_end(self) -> None:
        # What is quick has ended before the decision, however busy the machine is.
        if not hasattr(self.replay_buffer, "index"):
            # verl's own looks every two seconds.
            self.replay_buffer.poll_interval = 0.02
        while self.global_steps not in self.slow and self._in_flight():
            threading.Event().wait(0.01)
        super().on_step_end()  # type: ignore[misc]

    def _in_flight(self) -> int:
        """Groups that have not ended, as the replay buffer knows."""
        index = getattr(self.replay_buffer, "index", None)
        if index is not None:
            return len(index._groups("train", [buffer_pb2.GROUP_STATE_PENDING, buffer_pb2.GROUP_STATE_RUNNING]))
        self.replay_buffer.get_sampleable_count(self.global_steps + 1, "train")
        return len(self.replay_buffer.pending_keys["train"] | self.replay_buffer.running_keys["train"])

    def _validate(self) -> dict[str, float]:
        batch = tu.get_tensordict(
            collate(self.val_dataloader) | {"uid": [f"v{self.global_steps}-{n}" for n in range(VAL)]}
        )
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        tu.assign_non_tensor_data(batch, "validate", True)
        tag = {"is_prompt": True, "status": "pending", "global_steps": self.global_steps}
        tq.kv_batch_put(keys=list(batch["uid"]), partition_id="val", tags=[dict(tag) for _ in range(VAL)])
        self.agent_loop_manager.generate_sequences(batch)
        batch, _ = self.replay_buffer.sample(global_steps=self.global_steps, partition_id="val", batch_size=VAL)
        tq.kv_clear(keys=batch.keys, partition_id="val")
        return {"val/outputs": float(len(batch.keys))}

    def _balance_batch(self, batch: Any, metrics: Any) -> Any:
        return batch

    _compute_old_log_prob = _compute_advantage = _balance_batch

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        if self.global_steps == self.killed_at:
            raise RuntimeError(f"killed at step {self.global_steps}")
        return batch

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], **_: Any) -> None:
        metrics["batch/outputs"] = float(len(batch.keys))
        self.seen.append(metrics | {f"timing_s/{name}": value for name, value in timing_raw.items()})

    def _start_profiling(self) -> None: ...

    def _stop_profiling(self) -> None: ...


def configuration(folder: Path, *, steps: int, switch: bool, sampler_kwargs: dict[str, Any] | None = None) -> Any:
    """verl's configuration, its defaults and what a test of ours changes."""
    import verl.trainer.config as package

    config = OmegaConf.load(Path(package.__file__).parent / "_generated_ppo_trainer.yaml")
    changes = {
        "data.train_batch_size": GROUPS,
        "actor_rollout_ref.actor.ppo_mini_batch_size": MINI,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": N,
        "actor_rollout_ref.rollout.val_kwargs.n": 1,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": STANDALONES,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.response_length": TOKENS,
        "actor_rollout_ref.rollout.checkpoint_engine.backend": TRANSPORT,
        "algorithm.use_kl_in_reward": False,
        "algorithm.adv_estimator": "grpo",
        "critic.enable": False,
        "trainer.n_gpus_per_node": HYBRIDS,
        "trainer.logger": [],
        "trainer.total_training_steps": steps,
        "trainer.test_freq": 5,
        "trainer.save_freq": 5,
        "trainer.default_local_dir": str(folder),
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.parameter_sync_step": GROUPS // MINI,
        "trainer.v1.separate_async.num_warmup_batches": 1,
        "trainer.v1.separate_async.hybrid_rollout.enable_switch": switch,
        "trainer.v1.separate_async.hybrid_rollout.switch_threshold_ratio": 1.0,
        "trainer.v1.separate_async.hybrid_rollout.adaptive_switch_threshold": False,
        "trainer.v1.sampler.sampler_kwargs": sampler_kwargs or {},
    }
    for name, value in changes.items():
        OmegaConf.update(config, name, value, force_add=True)
    return config


def start_gate() -> Any:
    return ray.remote(num_cpus=0)(Gate).options(name="gate", max_concurrency=1000).remote()
