"""The loop with an engine that misbehaves, and with a trainer that is succeeded: real services, real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.buffer.service import build as build_buffer
from services.buffer.settings import BufferSettings
from services.engine.service import build as build_engine
from services.engine.settings import EngineSettings
from services.scheduler.service import build as build_scheduler
from services.scheduler.settings import SchedulerSettings
from tests.loop.test_loop import RUN, SCALE, prompts, spec
from turnout.buffer.v1 import buffer_pb2
from turnout.client import ClientOptions, RetryPolicy, TurnoutError
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2, scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, Moved, TrainerSetup, WeightTarget

LISTEN = ["127.0.0.1:0"]
ONCE = ClientOptions(retry=RetryPolicy(max_attempts=1))
METHODS = ["fault_hang", "fault_fail", "fault_heal"]


@dataclass
class Stack:
    """The three services, and what a trainer needs to reach them."""

    setup: TrainerSetup

    async def hooks(self, **changes: Any) -> AsyncTrainerHooks:
        """A trainer with its replicas registered."""
        values = {field: getattr(self.setup, field) for field in self.setup.__dataclass_fields__}
        opened: AsyncTrainerHooks

        async def update_weights(target: WeightTarget) -> Moved | None:
            await opened.move_bytes(target, b"w" * (1 << 16))
            return Moved(bytes_free={gpu.uuid: 1 << 20 for gpu in target.gpus})

        opened = await AsyncTrainerHooks.open(TrainerSetup(**{**values, "update_weights": update_weights, **changes}))
        for name in ("hybrid-0", "hybrid-1"):
            await self.register(opened, name, engine_pb2.REPLICA_ROLE_HYBRID)
        await self.register(opened, "standalone-0", engine_pb2.REPLICA_ROLE_STANDALONE)
        await opened.on_init_end()
        return opened

    async def register(self, hooks: AsyncTrainerHooks, name: str, role: engine_pb2.ReplicaRole.ValueType) -> None:
        await hooks.engine.calls.Register(engine_pb2.RegisterRequest(run_id=RUN, spec=spec(name, role)))

    async def fault(self, hooks: AsyncTrainerHooks, method: str, *, later_epochs: int = 0, **arguments: Any) -> None:
        """Break (or heal) hybrid-1, in the name of this trainer or a later one."""
        await hooks.engine.calls.CollectiveRpc(
            engine_pb2.CollectiveRpcRequest(
                run_id=RUN,
                epoch=hooks.epoch + later_epochs,
                selector=engine_pb2.ReplicaSelector(replica_ids=["hybrid-1"]),
                method=method,
                arguments_json=json.dumps({"kwargs": arguments}),
            )
        )


async def run_of(hooks: AsyncTrainerHooks) -> scheduler_pb2.Run:
    return (await hooks.scheduler.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=RUN))).run


async def stuck(hooks: AsyncTrainerHooks) -> str:
    """Wait until the run is stuck in between; why it is."""
    async with asyncio.timeout(30):
        while not (reason := (await run_of(hooks)).stuck_reason):  # noqa: ASYNC110 - there is no event of it
            await asyncio.sleep(0.05)
    return reason


async def train(hooks: AsyncTrainerHooks, step: int) -> list[str]:
    """One step of two mini-batches of 4; the groups trained on."""
    trained = []
    await hooks.prepare_step(step)
    for mini_batch in range(2):
        await hooks.on_sample_begin(step, mini_batch)
        batch = await hooks.sample(step, mini_batch, 4)
        await hooks.on_sample_end(step, mini_batch)
        trained += [group.group_id for group in batch.groups]
        await batch.commit()
    await hooks.on_step_end(step)
    return trained


async def finish(hooks: AsyncTrainerHooks, count: int) -> None:
    """Finish `count` groups, as a worker without engine would."""
    for _ in range(count):
        claims = await hooks.buffer.calls.ClaimGroups(
            buffer_pb2.ClaimGroupsRequest(run_id=RUN, partition="train", worker_id="w", max_trajectories=2)
        )
        results = [
            buffer_pb2.TrajectoryResult(
                token=claim.token,
                group_id=claim.group_id,
                index=trajectory.index,
                outputs=[buffer_pb2.Output(segments=[buffer_pb2.Segment(tokens=5, weight_version=0)])],
            )
            for claim in claims.claims
            for trajectory in claim.trajectories
        ]
        await hooks.buffer.calls.FinishTrajectories(
            buffer_pb2.FinishTrajectoriesRequest(run_id=RUN, partition="train", results=results)
        )


@asynccontextmanager
async def stack(
    data_dir: Path | None = None,
    *,
    scheduler_target: str = "",
    options: ClientOptions = ONCE,
    patience_s: float = 0.0,
    **engine: Any,
) -> AsyncIterator[Stack]:
    """The three services, but for the scheduler if there is one at `scheduler_target`.

    The buffer keeps what it knows in `data_dir`, if there is one.
    """
    engine_settings = EngineSettings(
        listen=LISTEN,
        time_scale=SCALE,
        weights_bytes=1 << 16,
        kv_bytes=1 << 16,
        fault_injection=True,
        allow_method=METHODS,
        **engine,
    )
    scheduler_settings = SchedulerSettings(
        listen=LISTEN,
        time_scale=SCALE,
        transition_attempts=1,
        transition_backoff_s=0.0,
        reclaim_patience_s=patience_s,
    )
    async with (
        build_buffer(BufferSettings(listen=LISTEN, time_scale=SCALE, data_dir=data_dir)) as buffer,
        build_engine(engine_settings) as engine_host,
        AsyncExitStack() as more,
    ):
        if not scheduler_target:
            scheduler_target = (await more.enter_async_context(build_scheduler(scheduler_settings))).target
        config = scheduler_pb2.RunConfig(
            switch=scheduler_pb2.SwitchConfig(enable_switch=True, switch_threshold_ratio=0.5),
            policy="verl",
            train_batch_size=8,
            parameter_sync_step=2,
            mini_batch_size=4,
            total_training_steps=5,
            hybrid_gpus=2,
            standalone_gpus=1,
        )
        config.engine_timeout.nanos = 300_000_000
        yield Stack(
            TrainerSetup(
                RUN,
                config,
                scheduler=scheduler_target,
                buffer=buffer.target,
                engine=engine_host.target,
                buffer_config=buffer_pb2.RunConfig(),
                options=options,
            )
        )


@pytest.mark.parametrize(("method", "arguments"), [("fault_hang", {}), ("fault_fail", {"call": "sleep", "times": 1})])
async def test_a_hybrid_that_does_not_sleep_keeps_the_trainer_out_until_it_does(
    method: str, arguments: dict[str, Any]
) -> None:
    """The real controller reports it as PARTIAL; a trainer that went on would allocate into its memory."""
    async with stack() as s:
        hooks = await s.hooks()
        await hooks.on_train_begin(prompts(0))
        await finish(hooks, 8)
        await s.fault(hooks, method, **arguments)
        with pytest.raises(TurnoutError) as caught:
            await hooks.on_step_begin(1)
        assert caught.value.reason == "RECLAIM_FAILED"
        assert "hybrid-1" in caught.value.metadata["failure.0"]
        run = await run_of(hooks)
        assert run.mode == events_pb2.MODE_RECLAIMING
        assert run.stuck_reason
        await s.fault(hooks, "fault_heal")
        await hooks.on_step_begin(1)
        assert (await run_of(hooks)).mode == events_pb2.MODE_TRAINER
        assert len(await train(hooks, 1)) == 8
        await hooks.close()


@pytest.mark.parametrize(("method", "arguments"), [("fault_hang", {}), ("fault_fail", {"call": "sleep", "times": 4})])
async def test_the_trainer_waits_for_an_engine_that_may_still_have_its_gpus(
    method: str, arguments: dict[str, Any]
) -> None:
    """Its agent was away while the GPUs were taken back, and the hook raised to a person though it came back soon."""
    async with stack(patience_s=60.0) as s:
        hooks = await s.hooks()
        await hooks.on_train_begin(prompts(0))
        await finish(hooks, 8)
        await s.fault(hooks, method, **arguments)
        beginning = asyncio.create_task(hooks.on_step_begin(1))
        assert "Reclaim: 1 of 2 replicas failed" in await stuck(hooks)
        assert not beginning.done()
        if method == "fault_hang":
            await s.fault(hooks, "fault_heal")
        async with asyncio.timeout(30):
            await beginning
        run = await run_of(hooks)
        assert (run.mode, run.stuck_reason) == (events_pb2.MODE_TRAINER, "")
        assert len(await train(hooks, 1)) == 8
        await hooks.close()


async def test_the_trainer_waits_no_longer_for_an_engine_that_was_taken_out() -> None:
    """An engine whose process is known to have ended holds no memory: whoever knows it deregisters the replica."""
    async with stack(patience_s=60.0) as s:
        hooks = await s.hooks()
        await hooks.on_train_begin(prompts(0))
        await finish(hooks, 8)
        await s.fault(hooks, "fault_hang", probe=True)
        beginning = asyncio.create_task(hooks.on_step_begin(1))
        await stuck(hooks)
        async with asyncio.timeout(30):
            request = engine_pb2.DeregisterRequest(run_id=RUN, replica_id="hybrid-1", epoch=hooks.epoch)
            await hooks.engine.calls.Deregister(request)
            await beginning
        assert (await run_of(hooks)).mode == events_pb2.MODE_TRAINER
        await hooks.close()


async def test_a_successor_does_not_wait_for_what_its_predecessor_waits_for() -> None:
    """A trainer that is started again must not be kept out by the patience of a call whose caller is dead."""
    async with stack(patience_s=600.0) as s:
        first = await s.hooks()
        await first.on_train_begin(prompts(0))
        await finish(first, 8)
        await s.fault(first, "fault_hang")
        beginning = asyncio.create_task(first.on_step_begin(1))
        await stuck(first)
        async with asyncio.timeout(30):
            resume = scheduler_pb2.Resume(resume_step=0, keep_live=True)
            opening = asyncio.create_task(s.hooks(resume=resume, take_over=True))
            with pytest.raises(TurnoutError):
                await beginning
            await s.fault(first, "fault_heal", later_epochs=1)
            second = await opening
        await second.close()
        await asyncio.gather(first.close(), return_exceptions=True)


async def test_a_successor_takes_over_lent_gpus_and_goes_on_with_the_groups_that_are_there() -> None:
    """A trainer that died with its GPUs lent leaves serving engines and half its groups behind."""
    async with stack() as s:
        first = await s.hooks()
        await first.on_train_begin(prompts(0, 16))
        await finish(first, 8)
        await first.on_step_begin(1)
        trained = await train(first, 1)
        assert (await run_of(first)).mode == events_pb2.MODE_ROLLOUT
        resume = scheduler_pb2.Resume(resume_step=1, keep_live=True)
        second = await s.hooks(resume=resume, take_over=True)
        assert second.epoch == first.epoch + 1
        assert second.next_step == 2
        with pytest.raises(TurnoutError) as caught:
            await first.on_step_begin(2)
        assert caught.value.reason == "STALE_EPOCH"
        await finish(second, 8)
        await second.on_step_begin(2)
        trained += await train(second, 2)
        assert len(trained) == len(set(trained)) == 16
        events = scheduler_pb2.WatchRunRequest(run_id=RUN, from_sequence=1, no_follow=True)
        added: list[str] = []
        async for batch in second.scheduler.calls.WatchRun(events):
            for event in batch.events:
                added += event.groups_added.group_ids
        assert sorted(added) == sorted(group.group_id for group in prompts(0, 16))
        await second.close()
        await asyncio.gather(first.close(), return_exceptions=True)
