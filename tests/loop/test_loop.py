"""Trainer, worker, buffer, engine and scheduler together: the whole loop over real sockets, in one process."""

import asyncio

import pytest

from services.buffer.service import build as build_buffer
from services.buffer.settings import BufferSettings
from services.engine.service import build as build_engine
from services.engine.settings import EngineSettings
from services.scheduler.service import build as build_scheduler
from services.scheduler.settings import SchedulerSettings
from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2, scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, Moved, TrainerSetup, WeightTarget
from turnout.worker import RolloutWorker, WorkerSetup

RUN = "loop"
STEPS, BATCH, MINI = 4, 8, 4
SCALE = 0.001
"""A domain second is a wall millisecond: responses of some hundred tokens take milliseconds."""


def prompts(step: int, count: int = BATCH, name: str = "g") -> list[buffer_pb2.GroupSpec]:
    return [
        buffer_pb2.GroupSpec(
            group_id=f"{name}-{step}-{number}",
            group_size=2,
            prompt=buffer_pb2.Payload(inline=f"prompt {step} {number}".encode()),
        )
        for number in range(count)
    ]


def spec(replica_id: str, role: engine_pb2.ReplicaRole.ValueType) -> engine_pb2.ReplicaSpec:
    return engine_pb2.ReplicaSpec(
        replica_id=replica_id,
        role=role,
        backend="reference",
        gpus=[engine_pb2.Gpu(node="n0", uuid=f"gpu-{replica_id}")],
        weights=engine_pb2.WEIGHTS_ORIGIN_NONE,
    )


async def test_a_job_lends_trains_and_loses_nothing() -> None:
    """The parts may each be right and still not fit: this is the loop a user runs."""
    listen = ["127.0.0.1:0"]
    engine_settings = EngineSettings(
        listen=listen, time_scale=SCALE, weights_bytes=1 << 16, kv_bytes=1 << 16, length_mean=300.0
    )
    async with (
        build_buffer(BufferSettings(listen=listen, time_scale=SCALE)) as buffer,
        build_engine(engine_settings) as engine,
        build_scheduler(SchedulerSettings(listen=listen, time_scale=SCALE)) as scheduler,
    ):
        moved: list[tuple[str, int]] = []

        async def update_weights(target: WeightTarget) -> Moved | None:
            role = engine_pb2.ReplicaRole.Name(target.role).removeprefix("REPLICA_ROLE_")
            moved.append((role, target.weight_version))
            await hooks.move_bytes(target, b"w" * (1 << 16))
            return Moved(bytes_free={gpu.uuid: 1 << 20 for gpu in target.gpus})

        setup = TrainerSetup(
            RUN,
            scheduler_pb2.RunConfig(
                switch=scheduler_pb2.SwitchConfig(enable_switch=True, switch_threshold_ratio=0.5),
                train_batch_size=BATCH,
                parameter_sync_step=BATCH // MINI,
                mini_batch_size=MINI,
                total_training_steps=STEPS,
                hybrid_gpus=2,
                standalone_gpus=1,
            ),
            scheduler=scheduler.target,
            buffer=buffer.target,
            engine=engine.target,
            buffer_config=buffer_pb2.RunConfig(train_batch_size=BATCH),
            update_weights=update_weights,
        )
        trained: list[str] = []
        async with await AsyncTrainerHooks.open(setup) as hooks:
            for name, role in (
                ("hybrid-0", engine_pb2.REPLICA_ROLE_HYBRID),
                ("hybrid-1", engine_pb2.REPLICA_ROLE_HYBRID),
                ("standalone-0", engine_pb2.REPLICA_ROLE_STANDALONE),
            ):
                await hooks.engine.calls.Register(engine_pb2.RegisterRequest(run_id=RUN, spec=spec(name, role)))
            await hooks.on_init_end()
            worker = RolloutWorker(
                WorkerSetup(RUN, buffer.target, engine.target, worker_id="w0", concurrency=64),
                reward_fn=lambda job, generation: {"reward": float(job.index)},
                tokenize=lambda job: list(job.prompt),
            )
            working = asyncio.create_task(worker.run())
            await hooks.on_train_begin(prompts(0))
            lends = 0
            costs: list[tuple[float, float]] = []
            for step in range(1, STEPS + 1):
                await hooks.on_step_begin(step)
                await hooks.add_groups(step, prompts(step))
                await hooks.prepare_step(step)
                for mini_batch in range(BATCH // MINI):
                    await hooks.on_sample_begin(step, mini_batch)
                    batch = await hooks.sample(step, mini_batch, MINI)
                    await hooks.on_sample_end(step, mini_batch)
                    trained += [group.group_id for group in batch.groups]
                    await batch.commit()
                metrics = await hooks.on_step_end(step)
                lends += int(metrics["separate_async/decision/should_switch_to_rollout"])
                costs.append((metrics["turnout/weights/tokens_recomputed"], metrics["turnout/weights/blackout_s"]))
                if step == 2:
                    await hooks.on_validate_begin(step)
                    await hooks.on_validate_end(step)
            worker.stop()
            await working
            answer = await hooks.scheduler.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=RUN))
            ledger = await hooks.buffer.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id=RUN, partition="train"))
            request = scheduler_pb2.WatchRunRequest(run_id=RUN, from_sequence=1, no_follow=True)
            events = [event async for batch in hooks.scheduler.calls.WatchRun(request) for event in batch.events]

        assert len(trained) == len(set(trained)) == STEPS * BATCH
        assert ledger.added == (STEPS + 1) * BATCH
        assert ledger.committed == STEPS * BATCH
        assert answer.run.lends == lends + 1
        assert [version for role, version in moved if role == "STANDALONE"] == list(range(STEPS + 1))
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        kinds = {event.WhichOneof("event") for event in events}
        assert {"groups_added", "group_finished", "trajectory_finished", "topology_changed", "reclaim_done"} <= kinds
        synced = [event.sync_done for event in events if event.HasField("sync_done") and not event.sync_done.hybrid]
        # That of the last step would be told with the next one.
        for told, (tokens, blackout) in zip(synced[1:], costs, strict=False):
            assert told.tokens_recomputed == tokens
            assert told.blackout_seconds == pytest.approx(blackout, abs=1e-5)
        assert len(synced) == STEPS
        assert all(blackout > 0 for _, blackout in costs), "the one standalone replica was paused"
        modes = [event.mode_changed.to for event in events if event.HasField("mode_changed")]
        assert modes[:4] == [
            events_pb2.MODE_LENDING,
            events_pb2.MODE_ROLLOUT,
            events_pb2.MODE_RECLAIMING,
            events_pb2.MODE_TRAINER,
        ]
