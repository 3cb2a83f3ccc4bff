"""The loop goes on after all standalone replicas were restarted: real services, real sockets, a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from services.buffer.service import build as build_buffer
from services.buffer.settings import BufferSettings
from services.engine.service import build as build_engine
from services.engine.settings import EngineSettings
from services.runtime.host import ServiceHost
from services.scheduler.service import build as build_scheduler
from services.scheduler.settings import SchedulerSettings
from tests.loop.test_loop import RUN, SCALE, prompts
from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2, scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, TrainerSetup, WeightTarget
from turnout.worker import RolloutWorker, WorkerSetup

LISTEN = ["127.0.0.1:0"]
STANDALONE = ("s0", "s1")
MINI, MINI_BATCHES = 4, 2
WITHIN_S = 30.0
"""Far above what any of it takes; a loop that stands still does so for ever."""


@dataclass
class Agent:
    """The process of an agent, as far as a process can die within this one."""

    role: str
    replicas: tuple[str, ...]
    listen: str = LISTEN[0]
    host: ServiceHost | None = None
    _life: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self) -> None:
        """A life of it, without weights; at the address of the one before."""
        settings = EngineSettings(
            agent=True,
            replica=[f"{name}:{self.role}" for name in self.replicas],
            replica_weights=False,
            listen=[self.listen],
            time_scale=SCALE,
            weights_bytes=1 << 16,
            kv_bytes=1 << 16,
            length_mean=300.0,
            grace_s=0.0,
        )
        self.host = await self._life.enter_async_context(build_engine(settings))
        self.listen = self.host.target

    async def die(self) -> None:
        """End it."""
        await self._life.aclose()


@dataclass
class Place:
    """Services, agents and a worker of one job."""

    setup: TrainerSetup
    agents: dict[str, Agent]
    moved: list[WeightTarget]

    async def dark(self, hooks: AsyncTrainerHooks) -> None:
        """Wait until the controller knows that no replica serves."""
        request = engine_pb2.WatchReplicasRequest(run_id=RUN)
        routes: dict[str, int] = {}
        async for message in hooks.engine.watch_replicas(request):
            routes |= {one.spec.replica_id: one.route for one in message.changed}
            if engine_pb2.ROUTE_STATE_SERVING not in routes.values():
                return


@asynccontextmanager
async def place() -> AsyncIterator[tuple[Place, AsyncTrainerHooks]]:
    """A job that has opened, with weights everywhere and a worker at work."""
    agents = {"standalone": Agent("standalone", STANDALONE), "hybrid": Agent("hybrid", ("h0",))}
    moved: list[WeightTarget] = []
    async with AsyncExitStack() as stack:
        settings: dict[str, Any] = {"listen": LISTEN, "time_scale": SCALE, "grace_s": 0.0}
        engine = await stack.enter_async_context(
            build_engine(EngineSettings(probe_interval=0.2, probe_timeout=1.0, **settings))
        )
        buffer = await stack.enter_async_context(build_buffer(BufferSettings(**settings)))
        scheduler = await stack.enter_async_context(build_scheduler(SchedulerSettings(dark_after_s=0.5, **settings)))
        for agent in agents.values():
            await agent.start()
            stack.push_async_callback(agent.die)

        async def update_weights(target: WeightTarget) -> None:
            moved.append(target)
            await hooks.move_bytes(target, b"w" * (1 << 16))

        setup = TrainerSetup(
            RUN,
            scheduler_pb2.RunConfig(
                switch=scheduler_pb2.SwitchConfig(enable_switch=True, switch_threshold_ratio=0.5),
                policy="verl",
                train_batch_size=MINI * MINI_BATCHES,
                parameter_sync_step=MINI_BATCHES,
                mini_batch_size=MINI,
                total_training_steps=5,
                hybrid_gpus=1,
                standalone_gpus=2,
            ),
            scheduler=scheduler.target,
            buffer=buffer.target,
            engine=engine.target,
            buffer_config=buffer_pb2.RunConfig(),
            update_weights=update_weights,
        )
        hooks = await AsyncTrainerHooks.open(setup)
        stack.push_async_callback(hooks.close)
        for agent in agents.values():
            for name in agent.replicas:
                role = engine_pb2.ReplicaRole.Value(f"REPLICA_ROLE_{agent.role.upper()}")
                spec = engine_pb2.ReplicaSpec(
                    replica_id=name,
                    role=role,
                    gpus=[engine_pb2.Gpu(node="n0", uuid=f"gpu-{name}")],
                    backend="agent",
                    endpoint=agent.listen,
                    weights=engine_pb2.WEIGHTS_ORIGIN_NONE,
                )
                await hooks.engine.calls.Register(engine_pb2.RegisterRequest(run_id=RUN, spec=spec))
        await hooks.on_init_end()
        worker = RolloutWorker(
            WorkerSetup(RUN, buffer.target, engine.target, worker_id="w0", concurrency=64),
            reward_fn=lambda job, generation: {"reward": 0.0},
            tokenize=lambda job: list(job.prompt),
        )
        working = asyncio.create_task(worker.run())

        async def stop() -> None:
            worker.stop()
            await working

        stack.push_async_callback(stop)
        yield Place(setup, agents, moved), hooks


async def mini_batch(hooks: AsyncTrainerHooks, step: int, number: int) -> tuple[set[int], float]:
    """Train on one; the weight versions its tokens came from, and how many replicas got weights meanwhile."""
    async with asyncio.timeout(WITHIN_S):
        await hooks.on_sample_begin(step, number)
        batch = await hooks.sample(step, number, MINI)
        await hooks.on_sample_end(step, number)
        await batch.commit()
    versions = {segment.weight_version for output in batch.outputs for segment in output.segments}
    return versions, batch.metrics.get("turnout/weights/restored", 0.0)


async def test_all_standalone_replicas_restart_while_the_trainer_waits_for_groups() -> None:
    """Nobody had weights, the trainer waited for groups, and no update came: the loop stood still for ever."""
    async with place() as (job, hooks):
        await hooks.add_groups(1, prompts(0, MINI, "before"))
        await hooks.on_step_begin(1)
        await hooks.prepare_step(1)
        await mini_batch(hooks, 1, 0)
        # Nothing is generated for the next one.
        await job.agents["standalone"].die()
        await job.dark(hooks)
        await hooks.add_groups(1, prompts(1, MINI))
        waiting = asyncio.create_task(mini_batch(hooks, 1, 1))
        await job.agents["standalone"].start()
        versions, restored = await waiting
        assert versions == {0}, "under the version that was served before"
        assert restored == 2.0
        assert {target.weight_version for target in job.moved if target.restoring} == {0}
        await hooks.on_step_end(1)
        assert [target.weight_version for target in job.moved if not target.restoring][-1] == 1


async def test_all_replicas_restart_while_the_gpus_are_lent() -> None:
    """Nobody had weights, and the trainer waited for groups without its GPUs: for ever."""
    async with place() as (job, hooks):
        await hooks.on_step_begin(1)
        for agent in job.agents.values():
            await agent.die()
        await job.dark(hooks)
        await hooks.add_groups(1, prompts(1, 2 * MINI))
        preparing = asyncio.create_task(hooks.prepare_step(1))
        for agent in job.agents.values():
            await agent.start()
        async with asyncio.timeout(WITHIN_S):
            await preparing
        assert hooks.mode == events_pb2.MODE_TRAINER
        assert (await mini_batch(hooks, 1, 0)) == ({0}, 2.0)
        await mini_batch(hooks, 1, 1)
        await hooks.on_step_end(1)
