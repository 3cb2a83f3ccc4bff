"""A trainer that saves, goes on, dies, and is resumed from what it saved: real services, real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.loop.test_faults import finish, run_of, stack, train
from tests.loop.test_loop import RUN, prompts
from turnout.buffer.v1 import buffer_pb2
from turnout.trainer import resume_from


async def test_a_resumed_trainer_gets_the_buffer_of_its_checkpoint(tmp_path: Path) -> None:
    """Weights of step 1 over a buffer of step 2 would train on nothing of step 2, ever."""
    async with stack(tmp_path) as s:
        first = await s.hooks()
        await first.on_train_begin(prompts(0, 24))
        await finish(first, 16)
        await first.on_step_begin(1)
        before = await train(first, 1)
        manifest = await first.save(1)
        assert json.loads(manifest)["buffer"] is True
        await first.on_step_begin(2)
        lost = await train(first, 2)
        assert len({*before, *lost}) == 16

        second = await s.hooks(resume=resume_from(manifest, 1), take_over=True)
        assert second.next_step == 2
        ledger = await second.buffer.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id=RUN, partition="train"))
        assert (ledger.added, ledger.committed) == (24, 8)
        assert (ledger.present.finished, ledger.present.pending) == (8, 8)
        await second.on_step_begin(2)
        again = await train(second, 2)
        assert again == lost, "the batch of the lost step is there again, oldest first"
        assert (await run_of(second)).step == 2
        await second.close()
        await asyncio.gather(first.close(), return_exceptions=True)
