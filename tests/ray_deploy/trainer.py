"""The demo's trainer as one that is killed and started again: it goes on where the buffer's ledger says it was.

    python -P -m tests.ray_deploy.trainer ASSIGNMENT STORE

Invariants: what was committed is not trained on again, what was not is; a step that was cut goes on with the rest of
its mini-batches. SIGTERM ends it after its step, with its ledger told.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from itertools import islice
from typing import Final

from services.demo.assignment import PARTITION, Assignment
from services.demo.process import run_process
from services.demo.report import Reporter
from services.demo.trainer import Trainer
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, NotFound, duration
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, TrainerSetup

CLAIM_S: Final = 5.0
"""Wall seconds after which the claims of a killed worker are given to others."""


class LastingTrainer(Trainer):
    """One life of it."""

    def __init__(self, assignment: Assignment, reporter: Reporter, store: str) -> None:
        super().__init__(assignment, reporter)
        self._store = store
        self._resume: scheduler_pb2.Resume | None = None
        self._stopping = False

    async def run(self) -> None:
        """Train until the job is done, or SIGTERM."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop)
        done = await self._find_out()
        job = self._job
        self._hooks = await AsyncTrainerHooks.open(self._setup())
        try:
            self._begin()
            await self._hooks.on_init_end()
            for step in range(self._hooks.next_step, job.steps + 1):
                await self._rest_of(step, done)
                done = 0
                if self._stopping:
                    break
            await self._tell_ledger()
            self._reporter.tell("job_ended")
        finally:
            await self._hooks.close(reason="the job is done")

    def _stop(self) -> None:
        self._stopping = True

    async def _find_out(self) -> int:
        """Where the lives before it came to: how many mini-batches of the next step they committed."""
        job = self._job
        async with AsyncBufferClient(self._assignment.buffer) as buffer:
            try:
                request = buffer_pb2.GetLedgerRequest(run_id=job.run_id, partition=PARTITION)
                ledger = await buffer.calls.GetLedger(request)
            except NotFound:
                return 0
        self._added = ledger.added
        for _ in islice(self._draws, ledger.added):
            pass
        steps, rest = divmod(ledger.committed, job.batch_size)
        self._resume = scheduler_pb2.Resume(resume_step=steps, keep_live=True)
        return rest // job.mini_batch_size

    def _setup(self) -> TrainerSetup:
        setup = super()._setup()
        config = buffer_pb2.RunConfig()
        assert setup.buffer_config is not None
        config.CopyFrom(setup.buffer_config)
        config.lease_times.claim.CopyFrom(duration(CLAIM_S / self._job.time_scale))
        stores = [self._store] if self._store else []
        return dataclasses.replace(
            setup, buffer_config=config, resume=self._resume, take_over=self._resume is not None, stores=stores
        )

    async def _rest_of(self, step: int, done: int) -> None:
        reporter, hooks, job = self._reporter, self._hooks, self._job
        self._step_now = step
        reporter.tell("step_began", step=step)
        await hooks.on_step_begin(step)
        # What was added in place of evicted groups counts, too, so there may be more than the step wants.
        await self._add(step, max(0, job.warmup_groups + step * job.batch_size - self._added))
        await hooks.prepare_step(step)
        for mini_batch in range(job.mini_batches - done):
            await hooks.on_sample_begin(step, mini_batch)
            batch = await hooks.sample(step, mini_batch, job.mini_batch_size)
            await hooks.on_sample_end(step, mini_batch, tokens=batch.tokens)
            await self._train(step, mini_batch, batch)
            reporter.tell("committed", step=step)
        await hooks.on_step_end(step)
        reporter.tell("step_ended", step=step)


def main() -> None:
    """Be the trainer's process."""
    assignment = Assignment.from_json(sys.argv[1])
    run_process("trainer", LastingTrainer(assignment, Reporter(assignment.job.time_scale), sys.argv[2]).run())


if __name__ == "__main__":
    main()
