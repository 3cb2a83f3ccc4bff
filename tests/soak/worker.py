"""A rollout worker: claims, and finishes, fails, interrupts or abandons, with payloads of all sizes.

    python -m tests.soak.worker NAME LIFE TARGET RUN DIRECTORY LARGEST SEED

Its book has a `sent` entry with the marks of results before they leave, and a `told` entry with what became of each.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.soak import content
from tests.soak.book import Book
from tests.soak.errand import OPTIONS, PAUSE_S, Errand, is_full, is_outage
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import AsyncBufferClient, FailedPrecondition, NotFound, TurnoutError, duration, new_request_id
from turnout.worker import Interrupted, Job, RolloutWorker, WorkerSetup

T = TypeVar("T")

PARTITION: Final = "train"

AT_ONCE: Final = 3
"""Claims at work at once in one process."""

RENEW_EVERY_S: Final = 1.5

LOST: Final = frozenset(
    {
        # The claim ran out or the group went, and somebody else settled it or has it now.
        "STALE_CLAIM",
        "GROUP_NOT_FOUND",
        "GROUP_SAMPLED",
        "GROUP_FAILED",
        "TRAJECTORY_FAILED",
        "TRAJECTORY_SETTLED",
        # An upload waited longer than its lease, or was made before a restore.
        "PAYLOAD_NOT_FOUND",
    }
)
"""Reasons for which a result may be refused in the course of kills and restores."""


class Worker:
    """One life of a worker that makes its own calls."""

    def __init__(self, errand: Errand, life: str, run_id: str, client: AsyncBufferClient, largest: int) -> None:
        self._errand = errand
        self._rng = errand.rng
        self._life = life
        self._run = run_id
        self._client = client
        self._largest = largest
        self._book = Book(errand.directory / f"{errand.name}.book")
        self._held: dict[str, pb.ClaimToken] = {}
        self._number = 0

    async def run(self) -> None:
        """Work until killed."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            for _ in range(AT_ONCE):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            for claim in await self._claim():
                self._held[claim.token.claim_id] = claim.token
                try:
                    await self._serve(claim)
                finally:
                    self._held.pop(claim.token.claim_id, None)

    async def _claim(self) -> Sequence[pb.Claim]:
        request = pb.ClaimGroupsRequest(
            run_id=self._run,
            partition=PARTITION,
            worker_id=f"{self._errand.name}.{self._life}",
            max_trajectories=self._rng.choice((1, 2, 4)),
            max_wait=duration(3.0),
            request_id=new_request_id(),
        )
        return (await self._insist(lambda: self._client.calls.ClaimGroups(request))).claims

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            tokens = list(self._held.values())
            if tokens:
                request = pb.RenewClaimsRequest(run_id=self._run, tokens=tokens)
                answer = await self._insist(partial(self._client.calls.RenewClaims, request))
                for outcome in answer.outcomes:
                    self._errand.check(outcome.code == 0 or outcome.reason == "STALE_CLAIM", f"renewing said {outcome}")

    async def _insist(self, call: Callable[[], Awaitable[T]], *, lost: bool = False) -> T:
        """Repeat until it succeeds. `lost`: what says that somebody else was faster is raised."""
        while True:
            try:
                answer = await call()
            except TurnoutError as error:
                if lost and isinstance(error, FailedPrecondition | NotFound):
                    raise
                if not is_outage(error):
                    self._errand.wrong(f"a call ended {error}")
                await asyncio.sleep(PAUSE_S)
            else:
                self._errand.ok()
                return answer

    # ---------------------------------------------------------------------------------------------------------- serving

    async def _serve(self, claim: pb.Claim) -> None:
        errand, group_id = self._errand, claim.group_id
        size = content.group_size(self._run, group_id)
        errand.check(claim.group_size == size, f"{group_id} has {claim.group_size} trajectories, not {size}")
        errand.check(claim.tags["id"] == group_id, f"{group_id} has the tags of {claim.tags['id']}")
        given = await self._bytes(claim, claim.prompt)
        if given is None:
            return
        errand.check(given == content.prompt(self._run, group_id), f"the prompt of {group_id} arrived altered")
        for item in claim.trajectories:
            if not await self._check_partial(claim, item):
                return
        await asyncio.sleep(self._rng.expovariate(1 / 0.03))
        if self._rng.random() < 0.2:
            await self._report(claim)
        fate = self._rng.random()
        if fate < 0.02:
            return
        if fate < 0.025:
            await self._fail_group(claim)
        elif fate < 0.12:
            await self._fail(claim, fate)
        else:
            await self._finish(claim)

    async def _bytes(self, claim: pb.Claim, payload: pb.Payload) -> bytes | None:
        """Return the bytes of a payload of a claim; None if the claim is lost."""
        if payload.WhichOneof("source") != "ref":
            return payload.inline
        while True:
            try:
                payloads = self._client.get_payloads(self._run, [payload.ref], claim=claim.token)
                (data,) = [data async for data in payloads]
                return data
            except (FailedPrecondition, NotFound) as error:
                self._errand.check(
                    error.reason in LOST, f"reading a prompt of {claim.group_id} by its claim ended {error}"
                )
                return None
            except TurnoutError as error:
                self._errand.check(is_outage(error), f"reading a prompt of {claim.group_id} ended {error}")
                await asyncio.sleep(PAUSE_S)

    async def _check_partial(self, claim: pb.Claim, item: pb.ClaimedTrajectory) -> bool:
        for output in item.partial.outputs:
            data = await self._bytes(claim, output.payload)
            if data is None:
                return False
            right = content.partial(self._run, claim.group_id, item.index)
            self._errand.check(data == right, f"the partial output of {claim.group_id}/{item.index} arrived altered")
        return True

    async def _report(self, claim: pb.Claim) -> None:
        progress = [
            pb.TrajectoryProgress(token=claim.token, group_id=claim.group_id, index=item.index, done=5, total=10)
            for item in claim.trajectories
        ]
        request = pb.ReportProgressRequest(run_id=self._run, partition=PARTITION, progress=progress)
        answer = await self._insist(lambda: self._client.calls.ReportProgress(request))
        for outcome in answer.outcomes:
            self._errand.check(
                outcome.code == 0 or outcome.reason in LOST, f"a report of progress was refused: {outcome}"
            )

    async def _fail_group(self, claim: pb.Claim) -> None:
        request = pb.FailGroupRequest(
            run_id=self._run, partition=PARTITION, group_id=claim.group_id, request_id=new_request_id()
        )
        try:
            await self._insist(lambda: self._client.calls.FailGroup(request), lost=True)
        except (FailedPrecondition, NotFound) as error:
            self._errand.check(error.reason in LOST, f"failing {claim.group_id} ended {error}")

    async def _fail(self, claim: pb.Claim, fate: float) -> None:
        kinds = {0.03: pb.FAILURE_KIND_PERMANENT, 0.06: pb.FAILURE_KIND_INTERRUPTED, 0.12: pb.FAILURE_KIND_RETRYABLE}
        kind = next(kind for below, kind in kinds.items() if fate < below)
        failures = []
        for item in claim.trajectories:
            failure = pb.TrajectoryFailure(
                token=claim.token, group_id=claim.group_id, index=item.index, kind=kind, error="the soak said so"
            )
            if kind != pb.FAILURE_KIND_PERMANENT and self._rng.random() < 0.5:
                data = content.partial(self._run, claim.group_id, item.index)
                segment = pb.Segment(tokens=3, weight_version=claim.born_step, end=pb.SEGMENT_END_CONTINUED)
                output = pb.Output(prompt_tokens=3, segments=[segment], payload=pb.Payload(inline=data))
                failure.partial.outputs.append(output)
            failures.append(failure)
        request = pb.FailTrajectoriesRequest(
            run_id=self._run, partition=PARTITION, failures=failures, request_id=new_request_id()
        )
        answer = await self._insist(lambda: self._client.calls.FailTrajectories(request))
        for outcome in answer.outcomes:
            self._errand.check(outcome.code == 0 or outcome.reason in LOST, f"a failure was refused: {outcome}")

    async def _finish(self, claim: pb.Claim) -> None:
        results = []
        for item in claim.trajectories:
            payload = await self._payload(content.result(self._run, claim.group_id, item.index, self._largest))
            results.append(
                pb.TrajectoryResult(
                    token=claim.token,
                    group_id=claim.group_id,
                    index=item.index,
                    outputs=[output_of(self._run, claim.group_id, item, payload, self._mark(), claim.born_step)],
                )
            )
        marks = [[one.group_id, one.index, one.outputs[0].tags["mark"]] for one in results]
        self._book.write("sent", items=marks)
        if self._rng.random() < 0.5:
            request = pb.FinishTrajectoriesRequest(
                run_id=self._run, partition=PARTITION, results=results, request_id=new_request_id()
            )
            answer = await self._insist(lambda: self._client.calls.FinishTrajectories(request))
            outcomes: Sequence[pb.ItemOutcome] = answer.outcomes
        else:
            outcomes = await self._insist(lambda: self._stream(results))
        self._errand.check(len(outcomes) == len(results), f"{len(results)} results had {len(outcomes)} outcomes")
        for outcome in outcomes:
            self._errand.check(outcome.code == 0 or outcome.reason in LOST, f"a result was refused: {outcome}")
        told = [[*mark, outcome.code] for mark, outcome in zip(marks, outcomes, strict=False)]
        self._book.write("told", items=told)

    async def _stream(self, results: list[pb.TrajectoryResult]) -> list[pb.ItemOutcome]:
        async def frames() -> AsyncIterator[pb.FinishStreamRequest]:
            header = pb.FinishStreamHeader(run_id=self._run, partition=PARTITION)
            yield pb.FinishStreamRequest(header=header)
            for number, one in enumerate(results):
                yield pb.FinishStreamRequest(batch=pb.FinishStreamBatch(sequence=number, results=[one]))

        outcomes: list[pb.ItemOutcome] = []
        answers: Any = self._client.calls.FinishStream(frames(), timeout=20.0)
        try:
            async for answer in answers:
                self._errand.check(answer.sequence == len(outcomes), "a batch was answered out of order")
                outcomes.extend(answer.outcomes)
        finally:
            answers.cancel()
        return outcomes

    def _mark(self) -> str:
        self._number += 1
        return f"{self._errand.name}.{self._life}.{self._number}"

    async def _payload(self, data: bytes) -> pb.Payload:
        return await self._insist(lambda: self._client.payload(self._run, data))


def output_of(
    run_id: str, group_id: str, item: pb.ClaimedTrajectory, payload: pb.Payload, mark: str, version: int
) -> pb.Output:
    """Return a finished output; it goes on from the partial one, if there is any."""
    continued = [segment for output in item.partial.outputs for segment in output.segments]
    return pb.Output(
        prompt_tokens=3,
        segments=[*continued, pb.Segment(tokens=1 + item.index, weight_version=version)],
        rewards={"reward": content.reward(run_id, group_id, item.index)},
        payload=payload,
        tags={"mark": mark, "continued": str(len(continued))},
    )


async def rollout(errand: Errand, life: str, run_id: str, client: AsyncBufferClient, largest: int) -> None:
    """Work with the client's own worker, which is not told what to do about faults."""
    book = Book(errand.directory / f"{errand.name}.book")
    number = 0

    async def generate(job: Job) -> pb.Output:
        nonlocal number
        errand.ok()
        errand.check(
            job.prompt == content.prompt(run_id, job.group_id), f"the prompt of {job.group_id} arrived altered"
        )
        await asyncio.sleep(errand.rng.expovariate(1 / 0.03))
        fate = errand.rng.random()
        if fate < 0.03:
            raise RuntimeError("the soak said so")
        if fate < 0.05:
            raise Interrupted("the soak said so")
        number += 1
        mark = f"{errand.name}.{life}.{number}"
        data = content.result(run_id, job.group_id, job.index, largest)
        book.write("sent", items=[[job.group_id, job.index, mark]])
        item = pb.ClaimedTrajectory(index=job.index, partial=job.partial)
        while True:
            try:
                payload = await client.payload(run_id, data)
                break
            except TurnoutError as error:
                errand.check(is_outage(error), f"an upload ended {error}")
                await asyncio.sleep(PAUSE_S)
        return output_of(run_id, job.group_id, item, payload, mark, job.born_step)

    setup = WorkerSetup(
        run_id=run_id, buffer=client.target, worker_id=f"{errand.name}.{life}", concurrency=AT_ONCE, options=OPTIONS
    )
    while True:
        try:
            await RolloutWorker(setup, generate_fn=generate).run()
        except TurnoutError as error:
            errand.check(is_full(error) or is_outage(error), f"the worker of the client ended {error}")
            await asyncio.sleep(PAUSE_S)


async def main() -> None:
    """Work as the command line says."""
    name, life, target, run_id, directory, largest, seed, kind = sys.argv[1:]
    errand = Errand(name, Path(directory), f"{seed}/{name}/{life}")
    async with AsyncBufferClient(target, OPTIONS) as client:
        if kind == "rollout":
            await rollout(errand, life, run_id, client, int(largest))
        await Worker(errand, life, run_id, client, int(largest)).run()


if __name__ == "__main__":
    asyncio.run(main())
