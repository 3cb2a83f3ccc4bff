"""The job of clients/*/ in Python: what the ledgers of the other languages are compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count, islice
from typing import Final

import google_crc32c

from turnout.buffer.v1 import buffer_pb2
from turnout.client import Generation
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, TrainerSetup, WeightTarget
from turnout.worker import Job, RolloutWorker, WorkerSetup, pack, unpack

PARTITION: Final = "train"
GROUP_SIZE: Final = 2
BATCH: Final = 4
MINI_BATCHES: Final = 2
MINI_BATCH: Final = BATCH // MINI_BATCHES
MAX_TOKENS: Final = 256


def prompts() -> Iterator[buffer_pb2.GroupSpec]:
    for number in count():
        data, content_type = pack([1000 + number, 7, 11])
        yield buffer_pb2.GroupSpec(
            group_id=f"group-{number:03}",
            group_size=GROUP_SIZE,
            prompt=buffer_pb2.Payload(inline=data, content_type=content_type),
            tags={"number": str(number)},
        )


def reward(token_ids: list[int]) -> float:
    return sum(token_ids) % 1000 / 1000


def seed(job: Job, request: engine_pb2.GenerateRequest) -> None:
    request.sampling.seed = job.index


def rewards(job: Job, generation: Generation) -> dict[str, float]:
    return {"reward": reward(generation.token_ids)}


async def ledger_of(run_id: str, buffer: str, engine: str, scheduler: str, steps: int) -> dict[str, object]:
    """Run the job and return what was trained on, and how the buffer accounts for it."""
    partition = buffer_pb2.PartitionConfig(name=PARTITION, default_group_size=GROUP_SIZE)
    supply, total, added = prompts(), steps * BATCH, 0
    setup = TrainerSetup(
        run_id=run_id,
        config=scheduler_pb2.RunConfig(
            switch=scheduler_pb2.SwitchConfig(enable_switch=True),
            policy="verl",
            train_batch_size=BATCH,
            parameter_sync_step=MINI_BATCHES,
            mini_batch_size=MINI_BATCH,
            total_training_steps=steps,
            hybrid_gpus=1,
            standalone_gpus=1,
            partition=PARTITION,
            num_warmup_batches=1,
            group_size=GROUP_SIZE,
            max_response_tokens=MAX_TOKENS,
        ),
        scheduler=scheduler,
        buffer=buffer,
        engine=engine,
        buffer_config=buffer_pb2.RunConfig(partitions=[partition], train_batch_size=BATCH),
        refill_fn=lambda _: None,
    )
    hooks = await AsyncTrainerHooks.open(setup)
    worker = RolloutWorker(
        WorkerSetup(run_id, buffer=buffer, engine=engine, max_tokens=MAX_TOKENS), request_fn=seed, reward_fn=rewards
    )
    working = asyncio.create_task(worker.run())
    trained: list[dict[str, object]] = []

    async def move(target: WeightTarget) -> None:
        await hooks.move_bytes(target, bytes([target.weight_version % 251]) * 2**20)

    async def add(step: int, wanted: int) -> None:
        nonlocal added
        groups = list(islice(supply, min(wanted, total - added)))
        added += len(groups)
        if groups:
            await hooks.add_groups(step, groups, end_of_prompts=added == total)

    try:
        await hooks.on_init_end(move)
        await add(1, hooks.warmup_groups)
        for step in range(hooks.next_step, steps + 1):
            await hooks.on_step_begin(step)
            await add(step, BATCH)
            await hooks.prepare_step(step)
            for mini_batch in range(MINI_BATCHES):
                await hooks.on_sample_begin(step, mini_batch)
                batch = await hooks.sample(step, mini_batch, MINI_BATCH)
                await hooks.on_sample_end(step, mini_batch)
                payloads = iter(await batch.payloads())
                for group in batch.groups:
                    outputs = [output for one in group.trajectories for output in one.outputs]
                    data = [bytes(next(payloads)) for _ in outputs]
                    ids = [
                        unpack(one, output.payload.content_type)[0] for one, output in zip(data, outputs, strict=True)
                    ]
                    trained.append(
                        {
                            "groupId": group.group_id,
                            "tokens": [len(one) for one in ids],
                            "crc32c": [f"{google_crc32c.value(one):08x}" for one in data],
                            "rewards": [reward(one) for one in ids],
                        }
                    )
                await batch.commit()
            await hooks.on_step_end(step, move)
        request = buffer_pb2.GetLedgerRequest(run_id=run_id, partition=PARTITION)
        ledger = await hooks.buffer.calls.GetLedger(request)
        return {
            "added": ledger.added,
            "committed": ledger.committed,
            "evicted": ledger.evicted,
            "groups": sorted(trained, key=lambda group: str(group["groupId"])),
        }
    finally:
        worker.stop()
        await hooks.close(reason="finished")
        await working
