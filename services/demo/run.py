"""Runs a job: starts its processes, lets the trainer train, records, and leaves nothing behind.

Invariants: when a job ends, however it ends, all of its processes have ended; a child that fails ends the job with
ChildFailed; the events of a job that failed are kept as far as they came.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.demo.assignment import Assignment
from services.demo.job import Job
from services.demo.recorder import OnEvent, Recorder
from services.demo.stack import replicas, start_services, start_workers
from services.processes.child import ChildSpec
from services.processes.fleet import Fleet
from turnout.client import AsyncEngineClient, AsyncSchedulerClient


def recorder_of(job: Job, on_event: OnEvent) -> Recorder:
    """Return what records a job; `on_event` gets every event at once, in no strict order."""
    return Recorder(job.run_id, job.time_scale, replicas(job), on_event)


async def run_job(job: Job, prompts: Path, recorder: Recorder) -> None:
    """Run a job from start to end. What was recorded stays in the recorder even if the job fails."""
    async with Fleet() as fleet:
        assignment = await start_services(fleet, Assignment(job, prompts))
        await start_workers(fleet, assignment)
        spec = ChildSpec("trainer", "services.demo.trainer", (assignment.to_json(),), ready=None)
        await fleet.run(train(fleet, spec, recorder, engine=assignment.engine, scheduler=assignment.scheduler))


async def train(fleet: Fleet, spec: ChildSpec, recorder: Recorder, *, engine: str, scheduler: str) -> None:
    """Run the trainer to its end and record meanwhile; `engine` and `scheduler` are targets."""
    async with AsyncEngineClient(engine) as engines, AsyncSchedulerClient(scheduler) as runs:
        watches = [asyncio.create_task(recorder.follow_replicas(engines))]
        try:
            trainer = await fleet.start(spec, on_line=recorder.take_line)
            ended = asyncio.create_task(fleet.finish(trainer))
            watches.append(asyncio.create_task(_follow_run(recorder, runs)))
            await _until(ended, watches)
            if ended.result() != 0:
                raise trainer.failure()
            await recorder.follow_run(runs, to_the_end=True)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)


async def _follow_run(recorder: Recorder, scheduler: AsyncSchedulerClient) -> None:
    # Before the job's clock runs there is no such run.
    await recorder.until_began()
    await recorder.follow_run(scheduler)


async def _until(ended: asyncio.Task[int], watches: list[asyncio.Task[None]]) -> None:
    """Return when `ended` is done; raise what a watch raises before that."""
    pending: set[asyncio.Task[None] | asyncio.Task[int]] = {ended, *watches}
    while not ended.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {ended}:
            task.result()
