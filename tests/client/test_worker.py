"""The rollout worker, against the real buffer and a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc
import pytest

from services.runtime.host import ServiceHost
from tests.client.fakes import FakeService, events, fail, failing, fake, in_turn
from tests.client.real import real_buffer
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, ClientOptions, RetryPolicy, RunNotFound, Timeouts, duration
from turnout.engine.v1 import engine_pb2
from turnout.worker import TOKENS, Interrupted, Job, RolloutWorker, WorkerSetup, WorkerStats, pack, unpack

OPTIONS = ClientOptions(timeouts=Timeouts(call=2, outage=5), retry=RetryPolicy(initial=0.01, maximum=0.05))
ALIVE = buffer_pb2.ItemOutcome()


@dataclass
class Place:
    """A buffer with one run, and a client of it."""

    host: ServiceHost
    client: AsyncBufferClient
    group_size: int = 2

    async def create(self, **config: Any) -> None:
        partition = buffer_pb2.PartitionConfig(name="train", default_group_size=self.group_size)
        await self.client.calls.CreateRun(
            buffer_pb2.CreateRunRequest(run_id="r1", config=buffer_pb2.RunConfig(partitions=[partition], **config))
        )

    async def add(self, count: int, prompt: buffer_pb2.Payload | None = None) -> None:
        data, content_type = pack([1, 2, 3])
        prompt = prompt or buffer_pb2.Payload(inline=data, content_type=content_type)
        groups = [buffer_pb2.GroupSpec(group_id=f"g{number}", prompt=prompt) for number in range(count)]
        await self.client.calls.AddGroups(
            buffer_pb2.AddGroupsRequest(run_id="r1", partition="train", step=1, groups=groups)
        )

    async def sample(self, batch: int) -> list[buffer_pb2.SampledGroup]:
        request = buffer_pb2.SampleRequest(run_id="r1", partition="train", step=1, batch=batch, max_wait=duration(20))
        sampled = await self.client.sample(request)
        assert sampled.done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED, sampled.done.reason
        return sampled.groups

    async def group(self, group_id: str) -> buffer_pb2.Group:
        request = buffer_pb2.GetGroupRequest(run_id="r1", partition="train", group_id=group_id)
        return (await self.client.calls.GetGroup(request)).group

    def worker(self, **how: Any) -> RolloutWorker:
        functions = {name: how.pop(name) for name in list(how) if name.endswith("_fn") or name == "tokenize"}
        settings: dict[str, Any] = {"options": OPTIONS, "concurrency": 4, "worker_id": "w1"} | how
        return RolloutWorker(WorkerSetup("r1", self.host.target, **settings), **functions)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with real_buffer() as host, AsyncBufferClient(host.target, OPTIONS) as client:
        yield Place(host, client)


@contextlib.asynccontextmanager
async def working(worker: RolloutWorker) -> AsyncIterator[RolloutWorker]:
    """Run a worker for the length of a block, then stop it."""
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(task, 20)


def output(tokens: int = 3, reward: float = 1.0) -> buffer_pb2.Output:
    return buffer_pb2.Output(
        prompt_tokens=3,
        segments=[buffer_pb2.Segment(tokens=tokens, weight_version=0)],
        rewards={"reward": reward},
        payload=buffer_pb2.Payload(inline=b"out"),
    )


@contextlib.contextmanager
def scripted_buffer(count: int, lease_s: float = 60) -> Iterator[FakeService]:
    """A fake that hands out `count` trajectories in one answer, then none."""
    claims = [
        buffer_pb2.Claim(
            token=buffer_pb2.ClaimToken(claim_id=f"c{number}", attempt=1),
            group_id=f"g{number}",
            trajectories=[buffer_pb2.ClaimedTrajectory(index=0)],
            lease=duration(lease_s),
        )
        for number in range(count)
    ]
    with fake("buffer") as service:
        service.script["ClaimGroups"] = in_turn(
            lambda request, context: buffer_pb2.ClaimGroupsResponse(claims=claims),
            lambda request, context: buffer_pb2.ClaimGroupsResponse(),
        )
        service.script["FinishTrajectories"] = finished
        yield service


def finished(request: buffer_pb2.FinishTrajectoriesRequest, context: Any) -> buffer_pb2.FinishTrajectoriesResponse:
    return buffer_pb2.FinishTrajectoriesResponse(outcomes=[buffer_pb2.ItemOutcome() for _ in request.results])


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds; the test's time limit is the end."""
    while not condition():  # noqa: ASYNC110 - the worker's inside has no event to wait for
        await asyncio.sleep(0.005)


# ------------------------------------------------------------------------------------------------------------ producing


async def test_a_worker_finishes_what_it_claims(place: Place) -> None:
    """The plain way through: claim, generate, finish; nothing twice, nothing left."""
    await place.create()
    await place.add(5)
    seen: list[tuple[str, int]] = []

    async def generate(job: Job) -> buffer_pb2.Output:
        seen.append((job.group_id, job.index))
        assert (job.attempt, job.group_size, job.born_step, job.content_type) == (1, 2, 1, TOKENS)
        assert unpack(job.prompt, job.content_type) == ([1, 2, 3], [])
        return output()

    async with working(place.worker(generate_fn=generate)) as worker:
        groups = await place.sample(5)
    assert sorted(seen) == [(f"g{number}", index) for number in range(5) for index in range(2)]
    assert all(len(group.trajectories) == 2 for group in groups)
    assert worker.stats == WorkerStats(finished=10)


async def test_it_never_holds_more_than_its_slots(place: Place) -> None:
    """Claims beyond the slots would wait in this worker while another one is idle."""
    await place.create()
    await place.add(8)
    at_work, most = 0, 0
    gate = asyncio.Event()

    async def generate(job: Job) -> buffer_pb2.Output:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await gate.wait()
        at_work -= 1
        return output()

    async with working(place.worker(generate_fn=generate, concurrency=3)) as worker:
        await eventually(lambda: at_work == 3)
        ledger = await place.client.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id="r1"))
        assert ledger.present.running == 2
        gate.set()
        await place.sample(8)
    assert most == 3
    assert worker.stats.finished == 16


async def test_results_that_are_ready_together_go_in_one_call() -> None:
    """One call per trajectory makes the buffer the bottleneck of a large run."""
    gate = asyncio.Event()

    async def generate(job: Job) -> buffer_pb2.Output:
        await gate.wait()
        return output()

    with scripted_buffer(20) as service:
        setup = WorkerSetup("r1", service.target, concurrency=20, options=OPTIONS)
        async with working(RolloutWorker(setup, generate_fn=generate)) as worker:
            await eventually(lambda: len(worker._work) == 20)
            gate.set()
            await eventually(lambda: worker.stats.finished == 20)
        sizes = [len(request.results) for request in service.requests("FinishTrajectories")]
        assert sum(sizes) == 20
        assert len(sizes) <= 2


async def test_a_batch_that_is_refused_as_a_whole_is_tried_one_by_one() -> None:
    """One result that is too large must not take its neighbours with it, and be failed itself."""

    def refuse_large(request: buffer_pb2.FinishTrajectoriesRequest, context: Any) -> Any:
        if any(result.group_id == "g1" for result in request.results):
            fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_LARGE")
        return finished(request, context)

    with scripted_buffer(3) as service:
        service.script["FinishTrajectories"] = refuse_large
        service.script["FailTrajectories"] = lambda request, context: buffer_pb2.FailTrajectoriesResponse(
            outcomes=[buffer_pb2.ItemOutcome()]
        )
        setup = WorkerSetup("r1", service.target, concurrency=3, options=OPTIONS)

        async def generate(job: Job) -> buffer_pb2.Output:
            return output()

        async with working(RolloutWorker(setup, generate_fn=generate)) as worker:
            await eventually(lambda: worker.stats.finished + worker.stats.failed == 3)
        ((failure,),) = (request.failures for request in service.requests("FailTrajectories"))
        assert (failure.group_id, failure.kind) == ("g1", buffer_pb2.FAILURE_KIND_RETRYABLE)
        assert "TOO_LARGE" in failure.error
    assert worker.stats == WorkerStats(finished=2, failed=1)


async def test_a_result_is_offered_until_the_buffer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of generation must not be thrown away since the buffer was slow once; the repeat carries the same id."""
    monkeypatch.setattr("turnout.worker._outbox._PAUSE_S", 0.01)
    with scripted_buffer(1) as service:
        service.script["FinishTrajectories"] = in_turn(failing(grpc.StatusCode.DEADLINE_EXCEEDED), finished)

        async def generate(job: Job) -> buffer_pb2.Output:
            return output()

        setup = WorkerSetup("r1", service.target, concurrency=1, options=OPTIONS)
        async with working(RolloutWorker(setup, generate_fn=generate)) as worker:
            await eventually(lambda: worker.stats.finished == 1)
        first, second = service.requests("FinishTrajectories")
        assert first == second
        assert first.request_id


async def test_a_full_disk_costs_no_rollout_and_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer short of space or of turns comes back; failing the trajectory instead throws its tokens away."""
    monkeypatch.setattr("turnout.worker._outbox._PAUSE_S", 0.01)
    monkeypatch.setattr("turnout.worker._worker._PAUSE_S", 0.01)

    def full(request: Any, context: Any) -> Any:
        fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "DISK_FULL")

    def crowded(request: Any, context: Any) -> Any:
        fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "CAP_PARKED_WAITS")

    with scripted_buffer(1) as service:
        claims = service.script["ClaimGroups"]
        service.script["ClaimGroups"] = in_turn(crowded, claims, claims, claims)
        service.script["FinishTrajectories"] = in_turn(full, full, finished)

        async def generate(job: Job) -> buffer_pb2.Output:
            return output()

        setup = WorkerSetup("r1", service.target, concurrency=1, options=OPTIONS)
        async with working(RolloutWorker(setup, generate_fn=generate)) as worker:
            await eventually(lambda: worker.stats.finished == 1)
        assert not service.requests("FailTrajectories")
    assert worker.stats == WorkerStats(finished=1)


async def test_a_plain_function_runs_beside_the_event_loop(place: Place) -> None:
    """Most generate functions block; on the loop they would stop the renewals and lose every claim."""
    await place.create()
    await place.add(2)
    both = threading.Barrier(4, timeout=10)
    threads: set[int] = set()

    def generate(job: Job) -> list[buffer_pb2.Output]:
        threads.add(threading.get_ident())
        both.wait()
        return [output(), output(5)]

    async with working(place.worker(generate_fn=generate)):
        groups = await place.sample(2)
    assert threading.get_ident() not in threads
    assert [len(one.outputs) for group in groups for one in group.trajectories] == [2] * 4


async def test_a_prompt_kept_by_reference_is_fetched_by_the_claim(place: Place) -> None:
    """A prompt with images is too large for a message; only the claim's owner may read it."""
    await place.create()
    long = bytes(range(256)) * 2000
    await place.add(1, await place.client.payload("r1", long, "application/octet-stream"))
    prompts: list[bytes] = []

    async def generate(job: Job) -> buffer_pb2.Output:
        prompts.append(job.prompt)
        return output()

    async with working(place.worker(generate_fn=generate)):
        await place.sample(1)
    assert prompts == [long, long]


# -------------------------------------------------------------------------------------------------------------- failing


async def test_a_failure_is_reported_and_tried_again(place: Place) -> None:
    """An exception of the user's function must use up an attempt, not the worker."""
    await place.create(max_attempts=2)
    await place.add(1)
    attempts: list[int] = []

    async def generate(job: Job) -> buffer_pb2.Output:
        if job.index == 0:
            attempts.append(job.attempt)
            if job.attempt == 1:
                raise ValueError("bad \ud800 luck")
        return output()

    async with working(place.worker(generate_fn=generate)) as worker:
        await place.sample(1)
    assert attempts == [1, 2]
    assert worker.stats == WorkerStats(finished=2, failed=1)


async def test_h14_a_worker_pauses_longer_from_failure_to_failure(place: Place) -> None:
    """A prompt that failed at once was tried ten thousand times; with an engine away all attempts of all were gone."""
    await place.create(max_attempts=4, refill=False)
    place.group_size = 1
    times: list[float] = []

    def failing_at_first(job: Job) -> buffer_pb2.Output:
        times.append(time.monotonic())
        if len(times) < 4:
            raise RuntimeError("the engine is away")
        return output()

    options = ClientOptions(retry=RetryPolicy(initial=0.1, multiplier=3.0, maximum=5.0, jitter=0.0))
    groups = [buffer_pb2.GroupSpec(group_id="g0", group_size=1)]
    await place.client.calls.AddGroups(
        buffer_pb2.AddGroupsRequest(run_id="r1", partition="train", step=1, groups=groups)
    )
    async with working(place.worker(generate_fn=failing_at_first, options=options, concurrency=1)):
        [group] = await place.sample(1)
    assert group.group_id == "g0"
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert [gap >= least for gap, least in zip(gaps, (0.1, 0.3, 0.9), strict=True)] == [True] * 3


async def test_a_result_that_the_buffer_refuses_becomes_a_failure(place: Place) -> None:
    """A NaN reward that is only logged leaves the group running until its lease ends, again and again."""
    await place.create()
    await place.add(1)

    async def generate(job: Job) -> buffer_pb2.Output:
        return output(reward=float("nan") if job.index == 0 else 1.0)

    async with working(place.worker(generate_fn=generate)) as worker:
        await eventually(lambda: worker.stats.failed == 1)
        group = await place.group("g0")
    assert group.state == buffer_pb2.GROUP_STATE_FAILED
    assert "REWARD_NOT_FINITE" in next(one.error for one in group.trajectories if one.error)


async def test_an_interrupted_attempt_goes_back_with_its_tokens_and_uses_up_nothing(place: Place) -> None:
    """An engine that is reclaimed is no fault of the trajectory."""
    await place.create(max_attempts=1)
    await place.add(1)
    data, content_type = pack([7, 8])
    partial = buffer_pb2.PartialOutput(
        outputs=[
            buffer_pb2.Output(
                prompt_tokens=3,
                segments=[buffer_pb2.Segment(tokens=2, weight_version=0, end=buffer_pb2.SEGMENT_END_CONTINUED)],
                payload=buffer_pb2.Payload(inline=data, content_type=content_type),
            )
        ]
    )
    continued: list[bytes] = []

    async def generate(job: Job) -> buffer_pb2.Output:
        if job.partial is None:
            raise Interrupted("reclaimed", partial)
        continued.append(job.partial.outputs[0].payload.inline)
        return output()

    async with working(place.worker(generate_fn=generate)) as worker:
        await place.sample(1)
    assert continued == [data, data]
    assert worker.stats == WorkerStats(finished=2, handed_back=2)


async def test_a_claim_that_was_lost_is_dropped_without_a_word(place: Place) -> None:
    """Work on trajectories that others have meanwhile is wasted, and its result must not be counted."""
    await place.create(lease_times=buffer_pb2.LeaseTimes(claim=duration(0.6)))
    await place.add(1)
    ends: list[str] = []

    async def generate(job: Job) -> buffer_pb2.Output:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return output()

    async with working(place.worker(generate_fn=generate)) as worker:
        await eventually(lambda: len(worker._work) == 2)
        await place.client.calls.EvictGroups(
            buffer_pb2.EvictGroupsRequest(run_id="r1", partition="train", group_ids=["g0"])
        )
        await eventually(lambda: worker.stats.lost == 2)
    assert ends == ["cancelled", "cancelled"]
    assert worker.stats == WorkerStats(lost=2)


async def test_a_claim_that_is_lost_while_its_failure_is_on_its_way_frees_its_slot() -> None:
    """A slot that is not given back is lost until the worker ends, and its claim is renewed as long."""
    lost = buffer_pb2.ItemOutcome(code=grpc.StatusCode.FAILED_PRECONDITION.value[0], reason="STALE_CLAIM")

    def renew(request: Any, context: Any) -> buffer_pb2.RenewClaimsResponse:
        return buffer_pb2.RenewClaimsResponse(outcomes=[lost] if service.requests("FailTrajectories") else [ALIVE])

    async def generate(job: Job) -> buffer_pb2.Output:
        raise Interrupted("the engine is away")

    with scripted_buffer(1, lease_s=0.15) as service:
        service.script["FailTrajectories"] = failing(grpc.StatusCode.UNAVAILABLE, "DRAINING")
        service.script["RenewClaims"] = renew
        worker = RolloutWorker(WorkerSetup("r1", service.target, options=OPTIONS), generate_fn=generate)
        async with working(worker):
            await eventually(lambda: worker.stats.lost == 1)
            assert not worker._work
            assert not worker._leases.held
    assert worker.stats == WorkerStats(lost=1)


async def test_a_claim_that_a_result_ended_is_not_lost_while_its_answer_is_on_its_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A renewal that overtakes the answer hears that the claim has ended; the trajectory is settled all the same."""
    ended = buffer_pb2.ItemOutcome(code=grpc.StatusCode.FAILED_PRECONDITION.value[0], reason="STALE_CLAIM")
    renewed = threading.Event()

    def renew(request: Any, context: Any) -> buffer_pb2.RenewClaimsResponse:
        if not service.requests("FinishTrajectories"):
            return buffer_pb2.RenewClaimsResponse(outcomes=[ALIVE])
        renewed.set()
        return buffer_pb2.RenewClaimsResponse(outcomes=[ended])

    def finish(request: Any, context: Any) -> buffer_pb2.FinishTrajectoriesResponse:
        assert renewed.wait(20)
        return buffer_pb2.FinishTrajectoriesResponse(outcomes=[ALIVE])

    async def generate(job: Job) -> buffer_pb2.Output:
        return output()

    with scripted_buffer(1, lease_s=1.5) as service:
        service.script["RenewClaims"] = renew
        service.script["FinishTrajectories"] = finish
        worker = RolloutWorker(WorkerSetup("r1", service.target, options=OPTIONS), generate_fn=generate)
        async with working(worker):
            await eventually(lambda: not worker._work and worker.stats != WorkerStats())
    assert worker.stats == WorkerStats(finished=1)
    assert "is lost" not in caplog.text


async def test_a_cancellation_inside_the_generate_function_is_a_failure(place: Place) -> None:
    """Taken for the end of the worker, it would keep the slot and the claim, and the group would never end."""
    await place.create()
    await place.add(1)

    async def generate(job: Job) -> buffer_pb2.Output:
        call = asyncio.get_running_loop().create_future()
        call.cancel()
        await call
        return output()

    async with working(place.worker(generate_fn=generate)) as worker:
        # The group fails with its first trajectory, so the other is not wanted any more.
        await eventually(lambda: worker.stats.failed + worker.stats.lost == 2)
        assert not worker._work
    assert (await place.group("g0")).state == buffer_pb2.GROUP_STATE_FAILED


async def test_claims_are_renewed_while_the_work_goes_on(place: Place) -> None:
    """Long trajectories outlive the claim lease by far."""
    await place.create(lease_times=buffer_pb2.LeaseTimes(claim=duration(0.5)))
    await place.add(1)

    async def generate(job: Job) -> buffer_pb2.Output:
        await asyncio.sleep(1.5)
        return output()

    async with working(place.worker(generate_fn=generate)) as worker:
        await place.sample(1)
    assert worker.stats == WorkerStats(finished=2)


# ------------------------------------------------------------------------------------------------- restarts and the end


async def test_stopping_hands_back_what_is_not_finished(place: Place) -> None:
    """Otherwise the trajectories wait for their lease to end, and count as failed attempts."""
    await place.create(max_attempts=1)
    await place.add(2)

    async def generate(job: Job) -> buffer_pb2.Output:
        await asyncio.sleep(60)
        return output()

    async with working(place.worker(generate_fn=generate)) as worker:
        await eventually(lambda: len(worker._work) == 4)
    group = await place.group("g0")
    assert {one.state for one in group.trajectories} == {buffer_pb2.TRAJECTORY_STATE_PENDING}
    assert [(one.attempt, one.used_attempts) for one in group.trajectories] == [(2, 0), (2, 0)]
    assert worker.stats == WorkerStats(handed_back=4)


async def test_cancelling_the_worker_hands_back_too(place: Place) -> None:
    """Ctrl-C cancels the main task; its claims must not be left to expire."""
    await place.create()
    await place.add(1)

    async def generate(job: Job) -> buffer_pb2.Output:
        await asyncio.sleep(60)
        return output()

    worker = place.worker(generate_fn=generate)
    task = asyncio.create_task(worker.run())
    await eventually(lambda: len(worker._work) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker.stats == WorkerStats(handed_back=2)


async def test_claims_that_were_on_their_way_when_it_stopped_are_handed_back() -> None:
    """A claim granted to a worker that has just gone would block its group until the lease ends."""
    granted = buffer_pb2.ClaimGroupsResponse(
        claims=[
            buffer_pb2.Claim(
                token=buffer_pb2.ClaimToken(claim_id="c1", attempt=1),
                group_id="g0",
                trajectories=[buffer_pb2.ClaimedTrajectory(index=0)],
                lease=duration(60),
            )
        ]
    )
    release = threading.Event()

    def late(request: Any, context: Any) -> Any:
        context.add_callback(release.set)
        release.wait(10)
        return granted

    async def generate(job: Job) -> buffer_pb2.Output:
        await asyncio.sleep(60)
        return output()

    with fake("buffer") as service:
        service.script["ClaimGroups"] = in_turn(late, lambda request, context: granted)
        service.script["FailTrajectories"] = lambda request, context: buffer_pb2.FailTrajectoriesResponse(
            outcomes=[buffer_pb2.ItemOutcome()]
        )
        async with working(
            RolloutWorker(WorkerSetup("r1", service.target, options=OPTIONS), generate_fn=generate)
        ) as worker:
            await asyncio.to_thread(service.wait_for, "ClaimGroups")
        first, second = service.requests("ClaimGroups")
        assert first.request_id == second.request_id != ""
        (handed_back,) = service.requests("FailTrajectories")
        (failure,) = handed_back.failures
        assert (failure.token.claim_id, failure.kind) == ("c1", buffer_pb2.FAILURE_KIND_INTERRUPTED)
    assert worker.stats == WorkerStats(handed_back=1)


async def test_a_worker_waits_for_its_run_and_gives_up_in_the_end(place: Place) -> None:
    """Workers often start before the trainer; a mistyped run must still be told."""
    with pytest.raises(RunNotFound):
        await place.worker(generate_fn=lambda job: output(), run_wait=0.1).run()
    async with working(place.worker(generate_fn=lambda job: output(), run_wait=30)) as worker:
        await place.create()
        await place.add(1)
        await place.sample(1)
    assert worker.stats.finished == 2


async def test_a_worker_goes_on_after_the_buffer_was_away() -> None:
    """Results that are ready while the buffer restarts must arrive when it is back."""
    with scripted_buffer(1) as service:
        away = asyncio.Event()

        async def generate(job: Job) -> buffer_pb2.Output:
            await asyncio.to_thread(service.stop)
            away.set()
            return output()

        setup = WorkerSetup("r1", service.target, options=OPTIONS)
        async with working(RolloutWorker(setup, generate_fn=generate)) as worker:
            await away.wait()
            await asyncio.to_thread(service.start)
            await eventually(lambda: worker.stats.finished == 1)


async def test_progress_is_reported_in_batches(place: Place) -> None:
    """One call per token and trajectory would drown the buffer."""
    await place.create()
    await place.add(2)
    reported = asyncio.Event()

    async def generate(job: Job) -> buffer_pb2.Output:
        for done in range(1, 50):
            job.report(done, total=50)
        await reported.wait()
        return output()

    async with working(place.worker(generate_fn=generate, progress_interval=0.05)):
        while True:
            groups = [await place.group(f"g{number}") for number in range(2)]
            if {one.done for group in groups for one in group.trajectories} == {49}:
                break
            await asyncio.sleep(0.02)
        reported.set()
        await place.sample(2)


# ----------------------------------------------------------------------------------------------------------- the engine


def generated(*segments: engine_pb2.OutputSegment, tokens: list[int], **done: Any) -> engine_pb2.GenerateResponse:
    reason = done.pop("finish_reason", engine_pb2.FINISH_REASON_STOP)
    return engine_pb2.GenerateResponse(
        done=engine_pb2.GenerateDone(
            finish_reason=reason, rest=engine_pb2.Delta(token_ids=tokens, **done), segments=segments
        )
    )


async def test_output_of_the_engine_keeps_versions_and_replicas(place: Place) -> None:
    """Staleness is judged by segment; a version lost on the way trains on data of unknown age."""
    await place.create()
    place.group_size = 1
    await place.add(1)
    first = engine_pb2.OutputSegment(tokens=2, weight_version=0, replica_id="h0", continued=True)
    second = engine_pb2.OutputSegment(tokens=1, weight_version=1, replica_id="s0")
    with fake("engine") as engine:
        engine.script["Generate"] = events(
            engine_pb2.GenerateResponse(placed=engine_pb2.Placed(replica_id="h0")),
            engine_pb2.GenerateResponse(delta=engine_pb2.Delta(token_ids=[5], logprobs=[-0.5])),
            generated(first, second, tokens=[6, 7], logprobs=[-0.25, -1.0]),
        )

        def change(job: Job, request: engine_pb2.GenerateRequest) -> None:
            request.sampling.seed = 17
            request.session_id = job.group_id

        worker = place.worker(
            engine=engine.target,
            max_tokens=9,
            request_fn=change,
            reward_fn=lambda job, generation: {"length": float(len(generation.token_ids))},
        )
        async with working(worker):
            (group,) = await place.sample(1)
        request = engine.requests("Generate")[0]
    assert list(request.prompt_token_ids) == [1, 2, 3]
    assert (request.max_tokens, request.sampling.seed, request.session_id) == (9, 17, "g0")
    # What the loss of a controller may cost.
    assert (request.delta_tokens, request.delta_interval.ToSeconds()) == (256, 5)
    assert (request.join_key.group_id, request.join_key.partition, request.join_key.attempt) == ("g0", "train", 1)
    made = group.trajectories[0].outputs[0]
    assert [(one.tokens, one.weight_version, one.replica_id, one.end) for one in made.segments] == [
        (2, 0, "h0", buffer_pb2.SEGMENT_END_CONTINUED),
        (1, 1, "s0", buffer_pb2.SEGMENT_END_COMPLETED),
    ]
    assert made.rewards == {"length": 3.0}
    assert made.tags == {"finish_reason": "STOP"}
    assert made.prompt_tokens == 3


async def test_a_prompt_in_words_needs_a_tokenizer(place: Place) -> None:
    """Bytes of text taken for int32 ids would generate nonsense without an error."""
    await place.create(max_attempts=1)
    await place.add(1, buffer_pb2.Payload(inline=b"four", content_type="text/plain"))
    with fake("engine") as engine:
        engine.script["Generate"] = events(generated(engine_pb2.OutputSegment(tokens=1), tokens=[1]))
        async with working(place.worker(engine=engine.target)) as worker:
            await eventually(lambda: worker.stats.failed >= 1)
        assert not engine.requests("Generate")
        await place.client.calls.EvictGroups(
            buffer_pb2.EvictGroupsRequest(run_id="r1", partition="train", group_ids=["g0"])
        )
        await place.add(1, buffer_pb2.Payload(inline=b"four", content_type="text/plain"))
        async with working(place.worker(engine=engine.target, tokenize=lambda job: list(job.prompt))):
            await place.sample(1)
        assert list(engine.requests("Generate")[0].prompt_token_ids) == list(b"four")


async def test_an_aborted_request_is_handed_back_and_continued(place: Place) -> None:
    """What an engine had generated before an operator's Abort is paid for; the next attempt goes on from there."""
    await place.create(max_attempts=1)
    await place.add(1)
    with fake("engine") as engine:

        def generate(request: engine_pb2.GenerateRequest, context: Any) -> Any:
            before = list(request.output_segments)
            if not before:
                segment = engine_pb2.OutputSegment(tokens=2, weight_version=0, replica_id="h0")
                yield generated(segment, tokens=[5, 6], finish_reason=engine_pb2.FINISH_REASON_ABORT)
            else:
                segment = engine_pb2.OutputSegment(tokens=1, weight_version=0, replica_id="s0")
                yield generated(*before, segment, tokens=[7])

        engine.script["Generate"] = generate
        async with working(place.worker(engine=engine.target)) as worker:
            (group,) = await place.sample(1)
        continued = [request for request in engine.requests("Generate") if request.output_token_ids]
    assert [list(request.output_token_ids) for request in continued] == [[5, 6], [5, 6]]
    assert [sum(one.tokens for one in each.outputs[0].segments) for each in group.trajectories] == [3, 3]
    assert worker.stats == WorkerStats(finished=2, handed_back=2)


async def test_a_generation_cut_by_a_restart_is_made_again_under_a_new_id(place: Place) -> None:
    """Under the old id the controller may still hold the request that is being aborted: REQUEST_LIVE."""
    await place.create()
    await place.add(1)
    with fake("engine") as engine:
        engine.script["Generate"] = in_turn(
            failing(grpc.StatusCode.UNAVAILABLE, "DRAINING"),
            events(),
            events(generated(engine_pb2.OutputSegment(tokens=1, weight_version=0), tokens=[5])),
        )
        async with working(place.worker(engine=engine.target)) as worker:
            await place.sample(1)
        ids = [request.request_id for request in engine.requests("Generate")]
    assert len(ids) == len(set(ids)) == 4
    assert worker.stats == WorkerStats(finished=2)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (lambda: RolloutWorker(WorkerSetup("r1", "x:1")), "engine target"),
        (
            lambda: RolloutWorker(WorkerSetup("r1", "x:1"), generate_fn=lambda job: output(), tokenize=lambda job: []),
            "generate function",
        ),
        (lambda: WorkerSetup("r1", "x:1", concurrency=0), "concurrency"),
        (lambda: WorkerSetup("r1", "x:1", max_tokens=0), "max_tokens"),
    ],
)
def test_wrong_setups_are_refused_when_they_are_made(how: Callable[[], object], named: str) -> None:
    """A worker with no way to generate that only fails at its first claim has taken work from others."""
    with pytest.raises(ValueError, match=named):
        how()


def test_token_payloads_come_back_exactly() -> None:
    """A trainer reads these bytes as they are."""
    assert unpack(*pack([])) == ([], [])
    assert unpack(*pack([0, -1, 2**31 - 1])) == ([0, -1, 2**31 - 1], [])
    assert unpack(*pack([1, 2], [-0.5, -1.25])) == ([1, 2], [-0.5, -1.25])
    assert pack([1])[0] == b"\x01\x00\x00\x00"
    for bad in (lambda: pack([1], [0.5, 0.5]), lambda: unpack(b"abc", TOKENS), lambda: unpack(b"", "text/plain")):
        with pytest.raises(ValueError, match=r"\w"):
            bad()
    with pytest.raises(OverflowError):
        pack([2**31])
