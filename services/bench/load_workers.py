"""The workers of some runs: the client's own, with a generate function that only takes time.

    python -P -m services.bench.load_workers ERRAND

Invariant: nothing fails here by intent, so a trajectory that failed or was lost is an error.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final
from zlib import crc32

from services.bench.load_plan import CLAIM_S, FILL, GENERATION_S, SAME_REWARD, Errand
from services.bench.load_process import ELSEWHERE, Errors, run_errand
from turnout.buffer.v1 import buffer_pb2
from turnout.worker import Job, RolloutWorker, WorkerSetup

SLOTS: Final = 64
"""Trajectories that a worker has at work at once, as an engine has sequences."""

REPORTS: Final = 4
"""Times that a trajectory tells how far it is."""

TOKENS: Final = 1000


def content(group_id: str, index: int, size: int) -> bytes:
    """Return the payload of a trajectory: nobody else's."""
    mark = f"{group_id}/{index}|".encode()
    return (mark * (size // len(mark) + 1))[:size]


def reward(group_id: str, index: int, *, fill: bool) -> float:
    """Return the reward of a trajectory; those of some groups are equal."""
    if not fill and crc32(group_id.encode()) % SAME_REWARD == 0:
        return 0.0
    return float(index % 2)


async def work(errand: Errand, stop: asyncio.Event, errors: Errors) -> dict[str, Any]:
    """Work until stopped."""
    plan, access = errand.plan, errand.access
    rng = random.Random(errand.runs[0])

    async def generate(job: Job) -> buffer_pb2.Output:
        fill = FILL in job.tags
        if not fill:
            seconds = rng.uniform(0.5, 1.5) * GENERATION_S
            for part in range(REPORTS):
                job.report(TOKENS * part // REPORTS, TOKENS)
                await asyncio.sleep(seconds / REPORTS)
        output = buffer_pb2.Output(prompt_tokens=len(job.prompt))
        output.segments.add(tokens=TOKENS, end=buffer_pb2.SEGMENT_END_COMPLETED, replica_id="standalone-0")
        output.rewards["reward"] = reward(job.group_id, job.index, fill=fill)
        output.payload.inline = content(job.group_id, job.index, plan.payload_bytes)
        return output

    workers = [
        RolloutWorker(
            WorkerSetup(
                run_id,
                access.buffer,
                worker_id=f"{run_id}-{number}",
                concurrency=SLOTS,
                run_wait=CLAIM_S,
                options=access.options(f"worker/{run_id}"),
            ),
            generate_fn=generate,
        )
        for run_id in errand.runs
        for number in range(plan.workers_per_run)
    ]

    async def stopping() -> None:
        await stop.wait()
        for worker in workers:
            worker.stop()

    watching = asyncio.create_task(stopping())
    ended = await asyncio.gather(*(worker.run() for worker in workers), return_exceptions=True)
    watching.cancel()
    for end in ended:
        if isinstance(end, BaseException):
            errors.add(f"a worker ended: {end!r}")
    stats = [worker.stats for worker in workers]
    for what in ("failed", "lost"):
        if count := sum(getattr(each, what) for each in stats):
            errors.add(f"{count} trajectories {what}")
    return {"finished": sum(each.finished for each in stats), "handed_back": sum(each.handed_back for each in stats)}


if __name__ == "__main__":
    run_errand(work, niceness=ELSEWHERE)
