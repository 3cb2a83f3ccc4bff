"""Clients of the switch scheduler.

Invariants: a wait that was torn is taken up with the same attempt, one that timed out with the next; a watch goes on
behind the last event that was yielded.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import Any, cast

from turnout.client._calls import BlockingCallChannel, duration
from turnout.client._client import AsyncClient, Client
from turnout.client._link import Link, iterate_blocking, run_blocking
from turnout.client._options import ClientOptions
from turnout.client._refills import PaysRefills
from turnout.client._waits import UNFINISHED, Arming, ProgressFn
from turnout.scheduler.v1 import events_pb2, scheduler_pb2, scheduler_pb2_grpc


class AsyncSchedulerClient(AsyncClient):
    """The switch scheduler, for asyncio. `calls` has every call of the contract."""

    def __init__(
        self,
        target: str,
        options: ClientOptions | None = None,
        *,
        rng: random.Random | None = None,
        link: Link | None = None,
    ) -> None:
        """See AsyncClient."""
        super().__init__(target, options, rng=rng, link=link)
        self.calls: scheduler_pb2_grpc.SwitchSchedulerAsyncStub = scheduler_pb2_grpc.SwitchSchedulerStub(
            cast(Any, self._channel)
        )
        """Every call, by its name in the contract: `await client.calls.EndStep(request, timeout=...)`."""

    async def incarnation(self, run_id: str) -> str:
        """Return what changes with every start of the service."""
        return (await self.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=run_id))).incarnation

    async def prepare_step(
        self,
        request: scheduler_pb2.PrepareStepRequest,
        *,
        refills: PaysRefills | None = None,
        on_progress: ProgressFn | None = None,
    ) -> scheduler_pb2.PrepareStepDone:
        """Wait until the trainer has its GPUs. `refills` (of the buffer client) adds prompts for what was evicted."""

        def arm(arming: Arming) -> scheduler_pb2.PrepareStepRequest:
            armed = scheduler_pb2.PrepareStepRequest()
            armed.CopyFrom(request)
            armed.attempt += arming.number
            armed.max_wait.CopyFrom(duration(arming.max_wait))
            return armed

        done = await self._hold(
            self.calls.PrepareStep,
            arm,
            request,
            again=lambda done: done.outcome in UNFINISHED,
            refills=refills,
            on_progress=on_progress,
        )
        return cast(scheduler_pb2.PrepareStepDone, done)

    async def begin_sample(
        self,
        request: scheduler_pb2.BeginSampleRequest,
        *,
        refills: PaysRefills | None = None,
        on_progress: ProgressFn | None = None,
    ) -> tuple[scheduler_pb2.BeginSampleDone, int]:
        """Announce a mini-batch; return the answer and the attempt to use in the next call for the same mini-batch."""
        attempt = request.attempt

        def arm(arming: Arming) -> scheduler_pb2.BeginSampleRequest:
            nonlocal attempt
            armed = scheduler_pb2.BeginSampleRequest()
            armed.CopyFrom(request)
            armed.attempt = attempt = request.attempt + arming.number
            armed.max_wait.CopyFrom(duration(arming.max_wait))
            return armed

        done = await self._hold(
            self.calls.BeginSample,
            arm,
            request,
            again=lambda done: done.HasField("timed_out"),
            refills=refills,
            on_progress=on_progress,
        )
        return cast(scheduler_pb2.BeginSampleDone, done), attempt + 1

    async def watch_run(self, request: scheduler_pb2.WatchRunRequest) -> AsyncGenerator[events_pb2.RunEvent, None]:
        """Yield the run's events; after a cut it goes on with the event after the last one seen."""
        armed = scheduler_pb2.WatchRunRequest()
        armed.CopyFrom(request)
        async with aclosing(self._follow(self.calls.WatchRun, lambda: armed)) as messages:
            async for message in messages:
                for event in message.events:
                    armed.from_sequence = event.sequence + 1
                    yield event


class SchedulerClient(Client):
    """The switch scheduler, blocking. The methods are those of AsyncSchedulerClient."""

    def __init__(self, target: str, options: ClientOptions | None = None, *, rng: random.Random | None = None) -> None:
        """See Client."""
        super().__init__(target, options, rng=rng)
        self.core = AsyncSchedulerClient(target, self.options, rng=rng, link=self.link)
        self.calls: scheduler_pb2_grpc.SwitchSchedulerStub = scheduler_pb2_grpc.SwitchSchedulerStub(
            cast(Any, BlockingCallChannel(self._policy))
        )
        """Every call, by its name in the contract: `client.calls.EndStep(request, timeout=...)`."""

    def incarnation(self, run_id: str) -> str:
        """Return what changes with every start of the service."""
        return run_blocking(self.core.incarnation(run_id))

    def prepare_step(
        self,
        request: scheduler_pb2.PrepareStepRequest,
        *,
        refills: PaysRefills | None = None,
        on_progress: ProgressFn | None = None,
    ) -> scheduler_pb2.PrepareStepDone:
        """See AsyncSchedulerClient."""
        return run_blocking(self.core.prepare_step(request, refills=refills, on_progress=on_progress))

    def begin_sample(
        self,
        request: scheduler_pb2.BeginSampleRequest,
        *,
        refills: PaysRefills | None = None,
        on_progress: ProgressFn | None = None,
    ) -> tuple[scheduler_pb2.BeginSampleDone, int]:
        """See AsyncSchedulerClient."""
        return run_blocking(self.core.begin_sample(request, refills=refills, on_progress=on_progress))

    def watch_run(self, request: scheduler_pb2.WatchRunRequest) -> Generator[events_pb2.RunEvent, None, None]:
        """See AsyncSchedulerClient."""
        return iterate_blocking(self.core.watch_run(request))
