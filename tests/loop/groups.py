"""What prompt sources, workers and trainers do with the groups of the runs, and the books of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from tests.buffer.helpers import result
from tests.loop.house import House
from tests.loop.jobs import BATCH, MINI, Job, Refused
from tests.scheduler.world import wall
from turnout.buffer.v1 import buffer_pb2 as bpb
from turnout.buffer.v1 import buffer_pb2_grpc


class Groups:
    """The groups of all runs. `asked` is what a call is answered, or Refused."""

    def __init__(
        self,
        house: House,
        stub: buffer_pb2_grpc.ReplayBufferAsyncStub,
        asked: Callable[[Awaitable[Any]], Awaitable[Any]],
    ) -> None:
        self._house = house
        self._buffer = stub
        self._asked = asked
        self._names = 0

    async def add(self, job: Job, count: int) -> None:
        """Prompts arrive."""
        if not job.alive:
            return
        names = [f"{job.run_id}-{self._names + number}" for number in range(count)]
        self._names += count
        groups = [bpb.GroupSpec(group_id=name, group_size=1) for name in names]
        request = bpb.AddGroupsRequest(
            run_id=job.run_id, partition="train", groups=groups, epoch=job.epoch, step=job.step
        )
        await self._asked(self._buffer.AddGroups(request))
        job.added += names

    async def claim(self, job: Job, count: int) -> None:
        """A worker takes groups."""
        answer = await self._asked(
            self._buffer.ClaimGroups(
                bpb.ClaimGroupsRequest(
                    run_id=job.run_id, partition="train", worker_id="w", max_trajectories=count, max_wait=wall(0)
                )
            )
        )
        job.claimed += answer.claims

    async def finish(self, job: Job, count: int) -> None:
        """It finishes some of those that it has."""
        finished, job.claimed = job.claimed[:count], job.claimed[count:]
        results = [result(claim.group_id, 0, token=claim.token) for claim in finished]
        if results:
            request = bpb.FinishTrajectoriesRequest(run_id=job.run_id, partition="train", results=results)
            await self._asked(self._buffer.FinishTrajectories(request))

    async def sample(self, job: Job) -> None:
        """The mini-batch, for which the standalone replicas make what is missing."""
        if not self._house.buffer.running:
            return
        await self.add(job, MINI)
        await self.claim(job, MINI)
        await self.finish(job, len(job.claimed))
        sample = self._buffer.Sample(
            bpb.SampleRequest(
                run_id=job.run_id,
                partition="train",
                epoch=job.epoch,
                step=job.step,
                batch=MINI,
                max_wait=wall(0),
            )
        )
        told = [event async for event in sample]
        done = told[-1].done
        if done.outcome != bpb.WAIT_OUTCOME_REACHED:
            return
        commit = bpb.CommitSampleRequest(run_id=job.run_id, epoch=job.epoch, lease_id=done.lease_id)
        job.committed += (await self._asked(self._buffer.CommitSample(commit))).group_ids

    async def supply(self, job: Job) -> None:
        """More groups than a step needs."""
        try:
            await self.add(job, BATCH)
            await self.claim(job, BATCH)
            await self.finish(job, len(job.claimed))
        except Refused:
            # The channel has not found the buffer again yet.
            await asyncio.sleep(0.02)

    async def check(self, jobs: Iterable[Job]) -> None:
        """No group is lost, and none is trained on twice."""
        for job in jobs:
            request = bpb.GetLedgerRequest(run_id=job.run_id, partition="train")
            ledger = await self._asked(self._buffer.GetLedger(request, wait_for_ready=True))
            present = ledger.present
            there = present.pending + present.running + present.finished + present.failed + present.sampled
            assert (ledger.added, ledger.committed) == (len(job.added), len(job.committed))
            assert ledger.added == ledger.committed + ledger.evicted + there
            assert len(set(job.committed)) == len(job.committed)
