"""A rollout worker of the demo.

    python -P -m services.demo.worker ASSIGNMENT

Invariants: it is the client's worker with nothing added but a seed per trajectory; SIGTERM hands its claims back.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Final

from services.demo.assignment import PARTITION, READY_LINE, Assignment
from services.demo.process import run_process
from turnout.engine.v1 import engine_pb2
from turnout.worker import Job, RolloutWorker, WorkerSetup

CONCURRENCY: Final = 4096
"""Above all trajectories that can be in flight: the engines, not the workers, are what rollouts wait for."""


def sample_seed(job: Job, request: engine_pb2.GenerateRequest) -> None:
    """Give each trajectory of a group its own seed, which is the same in every job."""
    request.sampling.seed = job.index


async def _work(assignment: Assignment) -> None:
    job = assignment.job
    setup = WorkerSetup(
        run_id=job.run_id,
        buffer=assignment.buffer,
        engine=assignment.engine,
        partition=PARTITION,
        worker_id=assignment.worker_id,
        concurrency=CONCURRENCY,
        max_tokens=job.max_tokens,
    )
    worker = RolloutWorker(setup, request_fn=sample_seed)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    print(READY_LINE, flush=True)
    await worker.run()


def main() -> None:
    """Be a worker's process."""
    assignment = Assignment.from_json(sys.argv[1])
    run_process(assignment.worker_id, _work(assignment))


if __name__ == "__main__":
    main()
