"""The rollout worker: claims trajectories, produces them, and settles them.

Invariants: it never holds more trajectories than it has slots, and asks for as many as it has free; a slot is free
again only when the buffer has taken the result, so a buffer that is away stops the worker instead of filling its
memory; every claimed trajectory is finished, failed, handed back, or lost by the buffer's own word; a claim whose
answer was lost is asked for again under the same request id; after a failure it pauses before it claims again, longer
from failure to failure until something succeeds, so that an engine that is away costs few attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

from turnout import tracing
from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    AlreadyExists,
    AsyncBufferClient,
    AsyncEngineClient,
    FailedPrecondition,
    NotFound,
    RunNotFound,
    TurnoutError,
    Unavailable,
    duration,
    new_request_id,
)
from turnout.client._payloads import Bytes
from turnout.client._retry import Backoff
from turnout.worker._generation import EngineGenerator, Interrupted, RequestFn, RewardFn, TokenizeFn
from turnout.worker._job import Job
from turnout.worker._leases import Held, Leases
from turnout.worker._outbox import Outbox, is_passing
from turnout.worker._payloads import Payloads
from turnout.worker._setup import WorkerSetup, WorkerStats

_log = logging.getLogger("turnout")

GenerateFn = Callable[
    [Job], buffer_pb2.Output | Sequence[buffer_pb2.Output] | Awaitable[buffer_pb2.Output | Sequence[buffer_pb2.Output]]
]
"""Produces the outputs of a trajectory, rewards and payload included. A plain function runs in a thread."""

_POLL_S: Final = 20.0
"""How long one ClaimGroups waits: below the half minute after which proxies cut a silent stream."""

_PAUSE_S: Final = 1.0
_HAND_BACK_S: Final = 5.0
"""A buffer that does not answer must not hold up the end of a worker; what is not handed back expires."""

_LOST: Final = (NotFound, FailedPrecondition, AlreadyExists)
"""What the buffer says of a result that is not wanted any more: evicted, issued again, settled, sampled."""

_ERROR_CHARACTERS: Final = 1000
_MAX_CLAIM: Final = 65_536
"""The most that one ClaimGroups may ask for."""


class RolloutWorker:
    """Works on one partition of one run until it is stopped."""

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        generate_fn: GenerateFn | None = None,
        reward_fn: RewardFn | None = None,
        request_fn: RequestFn | None = None,
        tokenize: TokenizeFn | None = None,
    ) -> None:
        """Without `generate_fn`, output comes from the engine's Generate; the other functions belong to that way."""
        self.setup = setup
        self.stats = WorkerStats()
        self._buffer = AsyncBufferClient(setup.buffer, setup.options)
        self._payloads = Payloads(self._buffer, setup.run_id, setup.store, setup.inline_bytes)
        self._engine: AsyncEngineClient | None = None
        if generate_fn is None:
            if setup.engine is None:
                raise ValueError("a worker needs an engine target or a generate function")
            self._engine = AsyncEngineClient(setup.engine, setup.options)
            generate_fn = EngineGenerator(
                self._payloads,
                self._engine,
                max_tokens=setup.max_tokens,
                sampling=setup.sampling,
                request_fn=request_fn,
                reward_fn=reward_fn,
                tokenize=tokenize,
            )
        elif reward_fn or request_fn or tokenize:
            raise ValueError("with a generate function, rewards and tokens are its own business")
        self._generate_fn: GenerateFn = generate_fn
        self._outbox = Outbox(self._buffer, run_id=setup.run_id, partition=setup.partition)
        self._work: dict[asyncio.Task[None], buffer_pb2.TrajectoryFailure] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._leases = Leases(self._buffer, run_id=setup.run_id, is_settling=self._settling.__contains__)
        self._fetching: set[asyncio.Future[bytes]] = set()
        self._progress: dict[tuple[str, int], buffer_pb2.TrajectoryProgress] = {}
        self._backoff = Backoff(setup.options.retry, random.Random())
        self._resume_at = 0.0
        self._threads: ThreadPoolExecutor | None = None
        self._freed = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Claim nothing more, let finished results out, hand the rest back and end `run`. Not from another thread."""
        self._stopping.set()

    async def payload(self, data: Bytes | Sequence[Bytes], content_type: str = "") -> buffer_pb2.Payload:
        """Return bytes, or a sequence of them, as the payload of an output: inline if small, else in the store.

        For generate functions of your own, on the worker's event loop.
        """
        return await self._payloads.make(data, content_type)

    async def run(self) -> WorkerStats:
        """Work until stopped or cancelled; return what was done. Raises RunNotFound if the run does not appear."""
        claiming = asyncio.create_task(self._claim_until_stopped())
        loops = [
            claiming,
            asyncio.create_task(self._outbox.run()),
            asyncio.create_task(self._leases.run()),
            asyncio.create_task(self._report_progress()),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        finally:
            claiming.cancel()
            await asyncio.gather(claiming, return_exceptions=True)
            await self._hand_back()
            await _cancel([*loops, *self._fetching])
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
            self._payloads.close()
            await self._buffer.close()
            if self._engine is not None:
                await self._engine.close()
        for task in done:
            task.result()
        return self.stats

    # -------------------------------------------------------------------------------------------------------- claiming

    async def _claim_until_stopped(self) -> None:
        while not self._stopping.is_set():
            if len(self._work) >= self.setup.concurrency:
                self._freed.clear()
                await _either(self._freed, self._stopping)
                continue
            pause = self._resume_at - time.monotonic()
            if pause > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
                continue
            for claim in await self._claim():
                self._begin(claim)

    async def _claim(self) -> Sequence[buffer_pb2.Claim]:
        request = buffer_pb2.ClaimGroupsRequest(
            run_id=self.setup.run_id,
            partition=self.setup.partition,
            worker_id=self.setup.worker_id,
            max_trajectories=min(self.setup.concurrency - len(self._work), _MAX_CLAIM),
            max_wait=duration(_POLL_S),
            request_id=new_request_id(),
        )
        give_up_at = time.monotonic() + self.setup.run_wait
        while True:
            try:
                return await self._poll(request)
            except RunNotFound:
                if time.monotonic() >= give_up_at:
                    raise
            except TurnoutError as error:
                if not is_passing(error):
                    raise
                _log.warning("nothing claimed: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _PAUSE_S)
            if self._stopping.is_set():
                return ()

    async def _poll(self, request: buffer_pb2.ClaimGroupsRequest) -> Sequence[buffer_pb2.Claim]:
        call = asyncio.ensure_future(self._buffer.calls.ClaimGroups(request))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((call, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                # The answer may be on its way: asking again under the same id tells, and then it can be handed back.
                await _cancel([call])
                request.max_wait.CopyFrom(duration(0))
                return (await self._buffer.calls.ClaimGroups(request, timeout=_HAND_BACK_S)).claims
            return (await call).claims
        finally:
            await _cancel([call, stopping])

    def _begin(self, claim: buffer_pb2.Claim) -> None:
        held = self._leases.hold(claim)
        prompt = asyncio.ensure_future(self._payloads.read(claim.prompt, claim.token))
        # Each trajectory sees its error; without any left, nobody has to.
        prompt.add_done_callback(lambda fetched: fetched.cancelled() or fetched.exception())
        self._fetching.add(prompt)
        prompt.add_done_callback(self._fetching.discard)
        for trajectory in claim.trajectories:
            task = asyncio.create_task(self._produce(claim, trajectory, held, prompt))
            held.tasks[trajectory.index] = task
            self._work[task] = buffer_pb2.TrajectoryFailure(
                token=claim.token, group_id=claim.group_id, index=trajectory.index
            )

    # ------------------------------------------------------------------------------------------------------- producing

    async def _produce(
        self,
        claim: buffer_pb2.Claim,
        trajectory: buffer_pb2.ClaimedTrajectory,
        held: Held,
        prompt: asyncio.Future[bytes],
    ) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            await self._attempt(task, claim, trajectory, prompt)
        except asyncio.CancelledError:
            if not held.lost:
                # The worker stops, and hands back what is in self._work.
                raise
            self.stats.lost += 1
        self._done(task, held, trajectory.index)

    async def _attempt(
        self,
        task: asyncio.Task[None],
        claim: buffer_pb2.Claim,
        trajectory: buffer_pb2.ClaimedTrajectory,
        prompt: asyncio.Future[bytes],
    ) -> None:
        failure = self._work[task]
        try:
            what = (self.setup.run_id, claim.group_id, trajectory.index, claim.token.attempt)
            with tracing.trajectory(claim.traceparent, *what):
                job = await self._job(claim, trajectory, await asyncio.shield(prompt))
                outputs = await self._generate(job)
                self._settling.add(task)
                result = buffer_pb2.TrajectoryResult(
                    token=claim.token, group_id=claim.group_id, index=trajectory.index, outputs=outputs
                )
                error = await self._outbox.finish(result)
        except asyncio.CancelledError as error:
            if task.cancelling():
                raise
            # Something that the generate function awaited was cancelled, not this trajectory.
            await self._fail(task, buffer_pb2.FAILURE_KIND_RETRYABLE, error)
        except Interrupted as interruption:
            if interruption.partial is not None:
                failure.partial.CopyFrom(interruption.partial)
            await self._fail(task, buffer_pb2.FAILURE_KIND_INTERRUPTED, interruption)
        except Unavailable as error:
            await self._fail(task, buffer_pb2.FAILURE_KIND_INTERRUPTED, error)
        except Exception as error:
            _log.warning("trajectory %d of group %s failed", trajectory.index, claim.group_id, exc_info=True)
            await self._fail(task, buffer_pb2.FAILURE_KIND_RETRYABLE, error)
        else:
            if error is None:
                self.stats.finished += 1
                self._backoff.reset()
            elif isinstance(error, _LOST):
                self.stats.lost += 1
            else:
                _log.warning("trajectory %d of group %s was refused: %s", trajectory.index, claim.group_id, error)
                await self._fail(task, buffer_pb2.FAILURE_KIND_RETRYABLE, error)

    async def _job(self, claim: buffer_pb2.Claim, trajectory: buffer_pb2.ClaimedTrajectory, prompt: bytes) -> Job:
        partial: buffer_pb2.PartialOutput | None = None
        if trajectory.HasField("partial") and trajectory.partial.outputs:
            partial = trajectory.partial
            for output in partial.outputs:
                output.payload.inline = await self._payloads.read(output.payload, claim.token)
        return Job(
            run_id=self.setup.run_id,
            partition=self.setup.partition,
            group_id=claim.group_id,
            index=trajectory.index,
            token=claim.token,
            prompt=prompt,
            content_type=claim.prompt.content_type,
            tags=dict(claim.tags),
            group_size=claim.group_size,
            born_step=claim.born_step,
            partial=partial,
            report_to=self._note_progress,
        )

    async def _generate(self, job: Job) -> Sequence[buffer_pb2.Output]:
        if _is_async(self._generate_fn):
            answer: Any = self._generate_fn(job)
        else:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.setup.concurrency, thread_name_prefix="turnout-generate")
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._generate_fn, job)
        if inspect.isawaitable(answer):
            answer = await answer
        return [answer] if isinstance(answer, buffer_pb2.Output) else list(answer)

    async def _fail(
        self, task: asyncio.Task[None], kind: buffer_pb2.FailureKind.ValueType, error: BaseException
    ) -> None:
        self._settling.add(task)
        # Many that fail in one pause have failed for one reason.
        if time.monotonic() >= self._resume_at:
            self._resume_at = time.monotonic() + self._backoff.next()
        failure = self._work[task]
        failure.kind = kind
        failure.error = _describe(error)
        answer = await self._outbox.fail(failure)
        if isinstance(answer, _LOST):
            self.stats.lost += 1
        elif kind == buffer_pb2.FAILURE_KIND_INTERRUPTED:
            self.stats.handed_back += 1
        else:
            self.stats.failed += 1

    def _done(self, task: asyncio.Task[None], held: Held, index: int) -> None:
        self._work.pop(task, None)
        self._settling.discard(task)
        self._progress.pop((held.token.claim_id, index), None)
        self._leases.settle(held, index)
        self._freed.set()

    # ------------------------------------------------------------------------------------------- progress, and the end

    def _note_progress(self, progress: buffer_pb2.TrajectoryProgress) -> None:
        self._progress[progress.token.claim_id, progress.index] = progress

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(self.setup.progress_interval)
            reports, self._progress = list(self._progress.values()), {}
            if reports:
                try:
                    await self._buffer.calls.ReportProgress(
                        buffer_pb2.ReportProgressRequest(
                            run_id=self.setup.run_id, partition=self.setup.partition, progress=reports
                        )
                    )
                except TurnoutError as error:
                    # The next batch has newer numbers anyway.
                    _log.debug("progress was not reported: %s", error)

    async def _hand_back(self) -> None:
        await _cancel([task for task in self._work if task not in self._settling])
        if self._settling:
            await asyncio.wait(self._settling, timeout=_HAND_BACK_S)
        await _cancel(list(self._work))
        failures = list(self._work.values())
        self._work.clear()
        for failure in failures:
            failure.kind = buffer_pb2.FAILURE_KIND_INTERRUPTED
            failure.error = "the worker stops"
        if not failures:
            return
        try:
            async with asyncio.timeout(_HAND_BACK_S):
                await self._outbox.send_failures(failures, new_request_id())
            self.stats.handed_back += len(failures)
        except (TurnoutError, TimeoutError) as error:
            _log.warning("%d trajectories were not handed back and will expire: %s", len(failures), error)


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text[:_ERROR_CHARACTERS].encode("utf-8", "replace").decode()


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(waits)


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
