"""The demo's trainer: a process that trains by waiting as long as training would take.

    python -P -m services.demo.trainer ASSIGNMENT

Invariants: it talks to the services through the client's hooks alone, as any trainer would; weights are real bytes,
other ones for each version; what it trains on is read to the last byte and reported, so that nothing about lost or
repeated data is assumed; every prompt of the job is added once and the supply is declared ended with the last.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final

import google_crc32c
import numpy as np

from services.demo.assignment import PARTITION, Assignment
from services.demo.job import WEIGHT_BYTES, Job
from services.demo.process import run_process
from services.demo.prompts import Draw, draws, load_prompts
from services.demo.report import Reporter
from turnout.buffer.v1 import buffer_pb2
from turnout.client import duration
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import AsyncBatch, AsyncTrainerHooks, Moved, TrainerSetup, WeightTarget
from turnout.worker import pack

CLAIM_S: Final = 3600.0
"""Domain seconds. Far above the longest response, so that claims need not be renewed all the time."""


class DataDamaged(Exception):
    """A trajectory's bytes are not what its lengths say."""


class Trainer:
    """One job from its first to its last step."""

    def __init__(self, assignment: Assignment, reporter: Reporter) -> None:
        self._job = assignment.job
        self._assignment = assignment
        self._reporter = reporter
        self._draws: Iterator[Draw] = draws(load_prompts(assignment.prompts), self._job.seed)
        self._added = 0
        self._step_now = 0
        self._hooks: AsyncTrainerHooks

    async def run(self) -> None:
        """Train the whole job."""
        began = time.monotonic()
        self._hooks = await AsyncTrainerHooks.open(self._setup())
        try:
            self._begin()
            await self._hooks.on_init_end()
            await self._add(1, self._hooks.warmup_groups)
            for step in range(self._hooks.next_step, self._job.steps + 1):
                await self._step(step)
            await self._tell_ledger()
            self._reporter.tell("job_ended", real_seconds=round(time.monotonic() - began, 3))
        finally:
            await self._hooks.close(reason="the job is done")

    def _setup(self) -> TrainerSetup:
        return TrainerSetup(
            run_id=self._job.run_id,
            config=run_config(self._job),
            scheduler=self._assignment.scheduler,
            buffer=self._assignment.buffer,
            engine=self._assignment.engine,
            buffer_config=buffer_config(self._job),
            update_weights=self._move_weights,
            refill_fn=self._refill,
        )

    def _begin(self) -> None:
        job = self._job
        self._reporter.begin(
            steps=job.steps,
            batch_size=job.batch_size,
            mini_batch_size=job.mini_batch_size,
            group_size=job.group_size,
            policy=job.policy if job.switching else "off",
            time_scale=job.time_scale,
        )
        self._reporter.state("updating", 0)

    async def _step(self, step: int) -> None:
        reporter, hooks = self._reporter, self._hooks
        self._step_now = step
        reporter.tell("step_began", step=step)
        reporter.state("waiting", step)
        await hooks.on_step_begin(step)
        await self._add(step, self._job.batch_size)
        await hooks.prepare_step(step)
        for mini_batch in range(self._job.mini_batches):
            reporter.state("waiting", step)
            await hooks.on_sample_begin(step, mini_batch)
            batch = await hooks.sample(step, mini_batch, self._job.mini_batch_size)
            await hooks.on_sample_end(step, mini_batch, tokens=batch.tokens)
            reporter.state("training", step)
            await self._train(step, mini_batch, batch)
        reporter.state("updating", step)
        await hooks.on_step_end(step)
        reporter.tell("step_ended", step=step)

    async def _train(self, step: int, mini_batch: int, batch: AsyncBatch) -> None:
        # Reading and accounting are part of the training time, not on top of it.
        ends = time.monotonic() + self._job.training_s / self._job.mini_batches * self._job.time_scale
        payloads = iter(await batch.payloads())
        for group in batch.groups:
            tokens, staleness, digest = [], [], 0
            for trajectory in group.trajectories:
                for output in trajectory.outputs:
                    length = sum(segment.tokens for segment in output.segments)
                    data = next(payloads)
                    if len(data) != 4 * length:
                        raise DataDamaged(f"{group.group_id}/{trajectory.index}: {len(data)} bytes for {length} tokens")
                    digest = google_crc32c.extend(digest, bytes(data))
                    tokens.append(length)
                    versions = [s.weight_version for s in output.segments if s.HasField("weight_version")]
                    staleness.append(step - 1 - max(versions, default=step - 1))
            self._reporter.tell(
                "group_trained",
                group_id=group.group_id,
                step=step,
                mini_batch=mini_batch,
                tokens=tokens,
                staleness=staleness,
                digest=f"{digest:08x}",
            )
        await batch.commit()
        await asyncio.sleep(ends - time.monotonic())

    async def _add(self, step: int, wanted: int) -> None:
        count = min(wanted, self._job.total_groups - self._added)
        self._added += count
        groups = self._groups(step, count)
        if groups:
            await self._hooks.add_groups(step, groups, end_of_prompts=self._added == self._job.total_groups)

    def _refill(self, count: int) -> list[buffer_pb2.GroupSpec]:
        # A group that was evicted is replaced by a fresh prompt, beyond those of the job.
        return self._groups(self._step_now, count)

    def _groups(self, step: int, count: int) -> list[buffer_pb2.GroupSpec]:
        made = []
        for draw in islice(self._draws, count):
            prompt, content_type = pack(draw.token_ids)
            made.append(
                buffer_pb2.GroupSpec(
                    group_id=draw.group_id,
                    group_size=self._job.group_size,
                    prompt=buffer_pb2.Payload(inline=prompt, content_type=content_type),
                    tags={"prompt_id": draw.prompt.prompt_id},
                )
            )
            self._reporter.tell(
                "group_added",
                group_id=draw.group_id,
                prompt_id=draw.prompt.prompt_id,
                step=step,
                trajectories=self._job.group_size,
            )
        return made

    async def _move_weights(self, target: WeightTarget) -> Moved:
        # Each version's bytes are its own, so that a replica with the wrong ones has another checksum.
        data = np.random.default_rng([self._job.seed, target.weight_version]).bytes(WEIGHT_BYTES)
        await self._hooks.move_bytes(target, data)
        checksum = f"{google_crc32c.value(data):08x}"
        return Moved(checksums=dict.fromkeys(target.replica_ids, checksum))

    async def _tell_ledger(self) -> None:
        request = buffer_pb2.GetLedgerRequest(run_id=self._job.run_id, partition=PARTITION)
        ledger = await self._hooks.buffer.calls.GetLedger(request)
        present = ledger.present
        self._reporter.tell(
            "ledger",
            added=ledger.added,
            committed=ledger.committed,
            evicted=ledger.evicted,
            present=present.pending + present.running + present.finished + present.failed + present.sampled,
        )


def run_config(job: Job) -> scheduler_pb2.RunConfig:
    """Return the job as the scheduler sees it. Staleness is unbounded, as by verl's default: nothing is evicted."""
    return scheduler_pb2.RunConfig(
        switch=scheduler_pb2.SwitchConfig(enable_switch=job.switching),
        policy=job.policy,
        train_batch_size=job.batch_size,
        parameter_sync_step=job.mini_batches,
        mini_batch_size=job.mini_batch_size,
        total_training_steps=job.steps,
        hybrid_gpus=job.hybrid_gpus,
        standalone_gpus=job.standalone_gpus,
        partition=PARTITION,
        num_warmup_batches=job.warmup_batches,
        group_size=job.group_size,
        max_response_tokens=job.max_tokens,
    )


def buffer_config(job: Job) -> buffer_pb2.RunConfig:
    """Return the job as the buffer sees it."""
    partition = buffer_pb2.PartitionConfig(
        name=PARTITION, kind=buffer_pb2.PARTITION_KIND_TRAINING, default_group_size=job.group_size
    )
    return buffer_pb2.RunConfig(
        partitions=[partition],
        train_batch_size=job.batch_size,
        lease_times=buffer_pb2.LeaseTimes(claim=duration(CLAIM_S)),
    )


def main() -> None:
    """Be the trainer's process."""
    assignment = Assignment.from_json(sys.argv[1])
    trainer = Trainer(assignment, Reporter(assignment.job.time_scale))
    run_process("trainer", trainer.run())


if __name__ == "__main__":
    main()
