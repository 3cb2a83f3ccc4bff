"""Runs a job: starts its processes, lets the trainer train, records, and leaves nothing behind.

Invariants: when a job ends, however it ends, all of its processes have ended and its folder is gone; a child that fails
ends the job with ChildFailed; the events of a job that failed are kept as far as they came.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from services.demo.run import train
from services.learner.assignment import Assignment
from services.learner.job import Job
from services.learner.recorder import MemoryRecorder
from services.learner.stack import ENVIRONMENT, start_stack
from services.processes.child import ChildSpec
from services.processes.fleet import Fleet


async def run_job(job: Job, prompts: Path, recorder: MemoryRecorder) -> None:
    """Run a job from start to end. What was recorded stays in the recorder even if the job fails."""
    with tempfile.TemporaryDirectory(prefix="turnout-learner-") as directory:
        async with Fleet() as fleet:
            assignment = await fleet.run(start_stack(fleet, Assignment(job, prompts), Path(directory)))
            spec = ChildSpec(
                "trainer", "services.learner.trainer", (assignment.to_json(),), ready=None, environment=ENVIRONMENT
            )
            await fleet.run(train(fleet, spec, recorder, engine=assignment.engine, scheduler=assignment.scheduler))
