"""The trainers of some runs: the client's hooks, stepping at a fixed pace.

    python -P -m services.bench.load_trainers ERRAND

Invariants: what the buffer acknowledged is written down before anything else is asked of it; steps are due at fixed
times, whatever the ones before took; every step brings as many prompts as keep the run's groups resident.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TextIO

from services.bench.load_plan import CLAIM_S, FILL, MINI_BATCHES, STEP_S, Errand
from services.bench.load_process import ELSEWHERE, Errors, run_errand, tell
from services.bench.load_workers import content
from turnout.buffer.v1 import buffer_pb2
from turnout.client import TurnoutError, duration
from turnout.client._payloads import Bytes
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, NotReached, TrainerSetup, WeightTarget

PARTITION: Final = "train"
WEIGHTS: Final = bytes(64 << 10)
PROMPT_BYTES: Final = 1024
FILL_AT_ONCE: Final = 256
"""Groups of one AddGroups while the buffer is filled."""

_WRONG: Final = (TurnoutError, NotReached)


class Book:
    """What the trainer of one run knows of its groups, in a file: lines of [run, fate, ids]."""

    def __init__(self, run_id: str, file: TextIO) -> None:
        self._run_id = run_id
        self._file = file

    def note(self, fate: str, ids: Iterable[str]) -> None:
        """Take down what happened to some groups."""
        self._file.write(json.dumps([self._run_id, fate, list(ids)]) + "\n")
        self._file.flush()


class Trainer:
    """One trainer."""

    def __init__(self, errand: Errand, run_id: str, file: TextIO, errors: Errors) -> None:
        self._errand = errand
        self._run_id = run_id
        self._book = Book(run_id, file)
        self._errors = errors
        self._numbers: Iterator[int] = itertools.count()
        self._resident = 0
        self.late: list[float] = []
        """Seconds by which each step began late."""

    async def open(self) -> AsyncTrainerHooks:
        """Begin the run, and fill the buffer."""
        plan, access = self._errand.plan, self._errand.access
        hooks = await AsyncTrainerHooks.open(
            TrainerSetup(
                self._run_id,
                scheduler_pb2.RunConfig(
                    switch=scheduler_pb2.SwitchConfig(enable_switch=True),
                    train_batch_size=plan.batch,
                    parameter_sync_step=MINI_BATCHES,
                    mini_batch_size=plan.mini_batch,
                    total_training_steps=1_000_000,
                    hybrid_gpus=1,
                    standalone_gpus=1,
                ),
                scheduler=access.scheduler,
                buffer=access.buffer,
                engine=access.engines[self._run_id],
                buffer_config=buffer_pb2.RunConfig(
                    train_batch_size=plan.batch,
                    group_filter_metric="reward",
                    refill=True,
                    lease_times=buffer_pb2.LeaseTimes(claim=duration(CLAIM_S)),
                ),
                refill_fn=self._refill,
                options=access.options(f"trainer/{self._run_id}"),
            )
        )

        async def move(target: WeightTarget) -> None:
            await hooks.move_bytes(target, WEIGHTS)

        self._move = move
        await hooks.on_init_end(move)
        added = 0
        while added < plan.groups_per_run:
            count = min(FILL_AT_ONCE, plan.groups_per_run - added)
            await self._add(hooks, hooks.next_step, count, FILL)
            added += count
            # Workers that take no time would otherwise flood a slow machine.
            await hooks.buffer.wait_for_sampleable(
                buffer_pb2.WaitForSampleableRequest(
                    run_id=self._run_id, partition=PARTITION, epoch=hooks.epoch, step=hooks.next_step, target=added
                ),
                refill_fn=lambda count: self._specs(count, FILL),
            )
        self._resident = plan.groups_per_run
        return hooks

    async def train(self, hooks: AsyncTrainerHooks, began: float, stop: asyncio.Event) -> None:
        """Step until stopped; the first step is due at `began`, in monotonic seconds."""
        for number in itertools.count():
            due = began + number * STEP_S
            if await _stopped(stop, due - time.monotonic()):
                return
            self.late.append(max(0.0, time.monotonic() - due))
            try:
                await self._step(hooks, hooks.next_step + number)
            except _WRONG as error:
                self._errors.add(f"step {number} of {self._run_id}: {error!r}")

    async def _step(self, hooks: AsyncTrainerHooks, step: int) -> None:
        plan = self._errand.plan
        await hooks.on_step_begin(step)
        if (wanted := plan.groups_per_run - self._resident) > 0:
            await self._add(hooks, step, wanted)
        await hooks.prepare_step(step)
        for mini_batch in range(MINI_BATCHES):
            await hooks.on_sample_begin(step, mini_batch)
            async with await hooks.sample(step, mini_batch, plan.mini_batch) as batch:
                await hooks.on_sample_end(step, mini_batch)
                ids = [group.group_id for group in batch.groups]
                self._book.note("sampled", ids)
                self._check(batch.groups, await batch.payloads())
            self._book.note("committed", ids)
            counts = batch.depth.counts
            self._resident = counts.pending + counts.running + counts.finished + counts.failed
        await hooks.on_step_end(step, self._move)

    def _check(self, groups: Sequence[buffer_pb2.SampledGroup], payloads: Sequence[Bytes]) -> None:
        size = self._errand.plan.payload_bytes
        expected = [
            content(group.group_id, trajectory.index, size)
            for group in groups
            for trajectory in group.trajectories
            for _ in trajectory.outputs
        ]
        if [bytes(each) for each in payloads] != expected:
            self._errors.add(f"a batch of {self._run_id} has other payloads than its groups")

    async def _add(self, hooks: AsyncTrainerHooks, step: int, count: int, *tags: str) -> None:
        specs = self._specs(count, *tags)
        await hooks.add_groups(step, specs)
        self._book.note("added", (spec.group_id for spec in specs))

    def _refill(self, count: int) -> list[buffer_pb2.GroupSpec]:
        # The wait pays with them; the buffer's events tell which were taken.
        return self._specs(count)

    def _specs(self, count: int, *tags: str) -> list[buffer_pb2.GroupSpec]:
        size = self._errand.plan.group_size
        prompt = buffer_pb2.Payload(inline=bytes(PROMPT_BYTES))
        return [
            buffer_pb2.GroupSpec(
                group_id=f"{self._run_id}/{next(self._numbers)}",
                group_size=size,
                prompt=prompt,
                tags=dict.fromkeys(tags, ""),
            )
            for _ in range(count)
        ]


async def _stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for so long, or until stopped; whether it was."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await stop.wait()
    except TimeoutError:
        pass
    return stop.is_set()


async def work(errand: Errand, stop: asyncio.Event, errors: Errors) -> dict[str, Any]:
    """Fill the buffer, say so, and train until stopped."""
    with open(errand.ledger, "w", encoding="utf-8") as file:  # noqa: ASYNC230 - small lines into the page cache
        trainers = [Trainer(errand, run_id, file, errors) for run_id in errand.runs]
        opened = await asyncio.gather(*(trainer.open() for trainer in trainers))
        tell("filled")
        began = time.monotonic()
        # Trainers of different runs have no common beat.
        begins = [began + STEP_S * number / len(trainers) for number in range(len(trainers))]
        await asyncio.gather(
            *(trainer.train(hooks, at, stop) for trainer, hooks, at in zip(trainers, opened, begins, strict=True))
        )
        for hooks in opened:
            await hooks.close(reason="the bench is over")
    return {"late": [round(each, 4) for trainer in trainers for each in trainer.late]}


if __name__ == "__main__":
    run_errand(work, niceness=ELSEWHERE)
