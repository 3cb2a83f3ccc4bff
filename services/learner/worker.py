"""The rollout worker of the job: the client's worker with a reward.

    python -P -m services.learner.worker ASSIGNMENT

Invariant: SIGTERM hands its claims back.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from typing import Final

from services.demo.assignment import READY_LINE
from services.demo.process import run_process
from services.learner.assignment import Assignment
from services.learner.job import PARTITION
from services.learner.task import reward
from turnout.client import Generation
from turnout.engine.v1 import engine_pb2
from turnout.worker import Job, RolloutWorker, WorkerSetup, unpack

REWARD: Final = "reward"
"""Name of the reward in the buffer."""


async def _work(assignment: Assignment) -> None:
    job = assignment.job

    def judge(claimed: Job, generation: Generation) -> Mapping[str, float]:
        prompt, _ = unpack(claimed.prompt, claimed.content_type)
        return {REWARD: reward(prompt, generation.token_ids, job.answer_tokens)}

    setup = WorkerSetup(
        run_id=job.run_id,
        buffer=assignment.buffer,
        engine=assignment.engine,
        partition=PARTITION,
        worker_id="worker-0",
        concurrency=job.batch_size * job.group_size,
        max_tokens=job.answer_tokens,
        sampling=engine_pb2.Sampling(temperature=1.0, logprobs=True),
        run_wait=600.0,
    )
    worker = RolloutWorker(setup, reward_fn=judge)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    print(READY_LINE, flush=True)
    await worker.run()


def main() -> None:
    """Be the worker's process."""
    run_process("worker", _work(Assignment.from_json(sys.argv[1])))


if __name__ == "__main__":
    main()
