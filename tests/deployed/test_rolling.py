"""A rolling restart, as docs/operations.md has it, under a job that goes on: no step is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.demo.job import Job
from tests.deployed.job import running, small_job, start
from tests.deployed.site import Site
from turnout.client import AsyncSchedulerClient
from turnout.scheduler.v1 import events_pb2, scheduler_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

AFTER_STEP = {2: "buffer", 4: "engine", 6: "scheduler", 8: "standalone-a", 9: "standalone-b"}
"""Which member is restarted once a step has ended."""

SWITCHING_OFF_AFTER = 10
"""The hybrid agent comes last: its GPUs must be with the trainer, and stay there, while it is away."""


async def test_every_process_is_restarted_in_turn_and_no_step_is_lost(tmp_path: Path) -> None:
    """A new release, on a job that runs for weeks."""
    job = small_job(steps=24)
    with Site(tmp_path, run_id=job.run_id) as site:
        start(site, job)
        await _restart_all(site, job)


async def _restart_all(site: Site, job: Job) -> None:
    async with running(site, job) as loop:
        for step, name in AFTER_STEP.items():
            await loop.until("step_ended", step=step)
            await asyncio.to_thread(site.members[name].restart)
        await loop.until("step_ended", step=SWITCHING_OFF_AFTER)
        off_from = await switched(site, job, False)
        await loop.until("trainer", state="training", step=off_from)
        assert (await run_of(site, job)).mode == events_pb2.MODE_TRAINER
        await asyncio.to_thread(site.members["hybrid"].restart)
        await switched(site, job, True)
        ledger = await loop.done()
        assert [line["step"] for line in loop.said("step_ended")] == list(range(1, job.steps + 1))
        trained = [line["group_id"] for line in loop.said("group_trained")]
    assert len(trained) == len(set(trained)) == job.total_groups
    assert (ledger["added"], ledger["committed"], ledger["evicted"], ledger["present"]) == (
        job.total_groups,
        job.total_groups,
        0,
        0,
    )
    assert all(member.lives == 2 for member in site.members.values())
    for member in site.members.values():
        assert member.stop() == 0
        assert "Traceback" not in member.said(), member.said()


async def run_of(site: Site, job: Job) -> scheduler_pb2.Run:
    async with AsyncSchedulerClient(site.members["scheduler"].target, site.options()) as client:
        return (await client.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=job.run_id))).run


async def switched(site: Site, job: Job, on: bool) -> int:
    """Have a run lend, or not, from its next step on; that step. As docs/operations.md has it."""
    async with AsyncSchedulerClient(site.members["scheduler"].target, site.options()) as scheduler:
        run = (await scheduler.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=job.run_id))).run
        switch = run.config.switch
        switch.enable_switch = on
        request = scheduler_pb2.UpdateRunRequest(run_id=run.run_id, epoch=run.epoch, switch=switch)
        return (await scheduler.calls.UpdateRun(request)).run.step + 1
