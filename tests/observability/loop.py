"""A short job over real services: everything that a metric or a trace could tell of happens once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from services.buffer.service import build as build_buffer
from services.buffer.settings import BufferSettings
from services.engine.service import build as build_engine
from services.engine.settings import EngineSettings
from services.runtime.host import ServiceHost
from services.scheduler.service import build as build_scheduler
from services.scheduler.settings import SchedulerSettings
from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, Moved, TrainerSetup, WeightTarget
from turnout.worker import RolloutWorker, WorkerSetup

RUN = "watched"
BATCH, MINI = 8, 4
SCALE = 0.02
"""Wall seconds per domain second, where lends are to be worth their cost."""

FAST = 0.002
"""The same where they need not be."""

LOCAL = "127.0.0.1:0"
ROLES = {
    "hybrid-0": engine_pb2.REPLICA_ROLE_HYBRID,
    "standalone-0": engine_pb2.REPLICA_ROLE_STANDALONE,
}
AGENT_ARGUMENTS = {
    "agent": True,
    "replica": [f"{name}:{name.partition('-')[0]}" for name in ROLES],
    "replica_weights": False,
    "weights_bytes": 1 << 16,
    "kv_bytes": 1 << 16,
    "length_mean": 1000.0,
    "decode_base": 0.001,
    "decode_per_request": 0.002,  # so that a second engine nearly doubles the speed
}


@dataclass
class Services:
    """The four that run. Names are those of their metrics."""

    buffer: ServiceHost
    engine: ServiceHost
    scheduler: ServiceHost
    agent: ServiceHost

    @property
    def targets(self) -> Targets:
        """Where they listen."""
        return Targets(self.buffer.target, self.engine.target, self.scheduler.target, self.agent.target)


@dataclass(frozen=True)
class Targets:
    """gRPC targets."""

    buffer: str
    engine: str
    scheduler: str
    agent: str


@contextlib.asynccontextmanager
async def services(data: Path, *, traces: bool = False) -> AsyncIterator[Services]:
    """All services, keeping what they know in `data`, with metrics."""

    def common(name: str) -> dict[str, object]:
        places = {"listen": [LOCAL], "metrics_listen": LOCAL, "data_dir": data / name}
        return {**places, "time_scale": FAST, "traces": traces}

    agent = {**common("agent"), **AGENT_ARGUMENTS}
    del agent["data_dir"]
    async with (
        build_buffer(BufferSettings.model_validate(common("buffer"))) as buffer,
        build_engine(EngineSettings.model_validate(common("engine"))) as engine,
        build_scheduler(SchedulerSettings.model_validate(common("scheduler"))) as scheduler,
        build_engine(EngineSettings.model_validate(agent)) as own_agent,
    ):
        yield Services(buffer, engine, scheduler, own_agent)


def _prompts(step: int) -> list[buffer_pb2.GroupSpec]:
    return [
        buffer_pb2.GroupSpec(
            group_id=f"g-{step}-{number}",
            group_size=2,
            prompt=buffer_pb2.Payload(inline=f"prompt {step} {number}".encode()),
        )
        for number in range(BATCH)
    ]


async def register(hooks: AsyncTrainerHooks, targets: Targets) -> None:
    """Tell the controller of the agent's replicas."""
    for name, role in ROLES.items():
        spec = engine_pb2.ReplicaSpec(
            replica_id=name,
            role=role,
            backend="agent",
            endpoint=targets.agent,
            gpus=[engine_pb2.Gpu(node="n0", uuid=f"gpu-{name}")],
            weights=engine_pb2.WEIGHTS_ORIGIN_NONE,
        )
        await hooks.engine.calls.Register(engine_pb2.RegisterRequest(run_id=RUN, spec=spec))


def setup(targets: Targets, steps: int, policy: str) -> TrainerSetup:
    """A trainer whose weights are a few bytes. It announces one step more, so that the last may lend."""
    return TrainerSetup(
        RUN,
        scheduler_pb2.RunConfig(
            policy=policy,
            switch=scheduler_pb2.SwitchConfig(enable_switch=True, switch_threshold_ratio=0.5),
            train_batch_size=BATCH,
            parameter_sync_step=BATCH // MINI,
            mini_batch_size=MINI,
            total_training_steps=steps + 1,
            hybrid_gpus=1,
            standalone_gpus=1,
        ),
        scheduler=targets.scheduler,
        buffer=targets.buffer,
        engine=targets.engine,
        buffer_config=buffer_pb2.RunConfig(train_batch_size=BATCH),
    )


async def step_of(hooks: AsyncTrainerHooks, step: int) -> None:
    """One step of training. Its last mini-batch waits for prompts that are added with it."""

    async def update_weights(target: WeightTarget) -> Moved | None:
        await hooks.move_bytes(target, b"w" * (1 << 16))
        return Moved(bytes_free={gpu.uuid: 1 << 20 for gpu in target.gpus})

    await hooks.on_step_begin(step)
    await hooks.add_groups(step, _prompts(step))
    await hooks.prepare_step(step)
    for mini_batch in range(BATCH // MINI):
        await hooks.on_sample_begin(step, mini_batch)
        batch = await hooks.sample(step, mini_batch, MINI)
        await hooks.on_sample_end(step, mini_batch)
        await batch.commit()
    await hooks.on_step_end(step, update_weights)


@contextlib.asynccontextmanager
async def job(targets: Targets, steps: int, policy: str = "verl") -> AsyncIterator[AsyncTrainerHooks]:
    """A job that was begun, with a worker at work; the steps are the caller's, up to `steps`."""
    async with await AsyncTrainerHooks.open(setup(targets, steps, policy)) as hooks:

        async def update_weights(target: WeightTarget) -> Moved | None:
            await hooks.move_bytes(target, b"w" * (1 << 16))
            return Moved(bytes_free={gpu.uuid: 1 << 20 for gpu in target.gpus})

        await register(hooks, targets)
        await hooks.on_init_end(update_weights)
        worker = RolloutWorker(
            WorkerSetup(RUN, targets.buffer, targets.engine, worker_id="w0", concurrency=64),
            reward_fn=lambda job, generation: {"reward": float(job.index)},
            tokenize=lambda job: list(job.prompt),
        )
        working = asyncio.create_task(worker.run())
        try:
            yield hooks
        finally:
            worker.stop()
            await working


async def close_without_engines(hooks: AsyncTrainerHooks) -> None:
    """Close the run of a job whose agent was stopped: nobody could confirm that its GPUs are free."""
    request = scheduler_pb2.CloseRunRequest(run_id=RUN, epoch=hooks.epoch, reason="finished", engines_gone=True)
    await hooks.scheduler.calls.CloseRun(request)
