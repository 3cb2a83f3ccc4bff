"""The demo's worker, whose payloads may go into an external store, and who says what the buffer acknowledged.

python -P -m tests.ray_deploy.worker ASSIGNMENT STORE
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from services.demo.assignment import PARTITION, READY_LINE, Assignment
from services.demo.process import run_process
from services.demo.worker import CONCURRENCY, sample_seed
from turnout.buffer.v1 import buffer_pb2
from turnout.client import INLINE_BYTES, TurnoutError
from turnout.worker import RolloutWorker, WorkerSetup


async def _work(assignment: Assignment, store: str) -> None:
    job = assignment.job
    setup = WorkerSetup(
        run_id=job.run_id,
        buffer=assignment.buffer,
        engine=assignment.engine,
        partition=PARTITION,
        worker_id=assignment.worker_id,
        concurrency=CONCURRENCY,
        max_tokens=job.max_tokens,
        store=store or None,
        # The demo's payloads are small: in a store, all of them are.
        inline_bytes=0 if store else INLINE_BYTES,
    )
    worker = RolloutWorker(setup, request_fn=sample_seed)
    # No other place knows when a result was acknowledged, and nobody but this test wants to.
    finish = worker._outbox.finish

    async def told(result: buffer_pb2.TrajectoryResult) -> TurnoutError | None:
        error = await finish(result)
        if error is None:
            tokens = sum(segment.tokens for output in result.outputs for segment in output.segments)
            said = {"event": "acknowledged", "group_id": result.group_id, "index": result.index, "tokens": tokens}
            print(json.dumps(said), flush=True)
        return error

    worker._outbox.finish = told  # type: ignore[method-assign]
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    print(READY_LINE, flush=True)
    await worker.run()


def main() -> None:
    """Be a worker's process."""
    assignment = Assignment.from_json(sys.argv[1])
    run_process(assignment.worker_id, _work(assignment, sys.argv[2]))


if __name__ == "__main__":
    main()
