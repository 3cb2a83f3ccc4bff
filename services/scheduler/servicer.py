"""The switch scheduler on the wire: requests to calls of the run, answers to messages.

Invariant: nothing is decided here; every call of a trainer is checked for its epoch first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import grpc.aio

from services.runtime.waits import duration_of, wait_budget
from services.scheduler.answers import completed_lend
from services.scheduler.convert import switch_from_proto
from services.scheduler.convert_events import event_to_proto
from services.scheduler.domain.lends import lend_closed
from services.scheduler.hosted import HostedRun, Tools
from services.scheduler.opening import opening_of
from services.scheduler.registry import Registry
from services.scheduler.steps import CompletedLend
from services.scheduler.trainer_calls import TrainerCalls, optional_s
from services.scheduler.waiting import Event
from turnout.buffer.v1 import buffer_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb
from turnout.scheduler.v1 import scheduler_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_WATCH_BATCH = 500
"""Events in one message of WatchRun: far below the 4 MiB that many clients accept, also when they hold progress."""


class SchedulerServicer(scheduler_pb2_grpc.SwitchSchedulerServicer):
    """Answers the calls of turnout.scheduler.v1.SwitchScheduler."""

    def __init__(self, registry: Registry, tools: Tools, incarnation: str) -> None:
        self._registry = registry
        self._tools = tools
        self._incarnation = incarnation

    # --------------------------------------------------------------------------------------------------- runs

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.OpenRunResponse:
        return await self._registry.open(opening_of(request))

    async def CloseRun(self, request: pb.CloseRunRequest, context: Context) -> pb.CloseRunResponse:
        closing = self._registry.close_run(
            request.run_id, request.epoch, request.reason, engines_gone=request.engines_gone
        )
        await closing
        return pb.CloseRunResponse()

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        hosted = self._registry.get(request.run_id)
        answer = pb.GetRunResponse(run=hosted.shown(), incarnation=self._incarnation)
        await hosted.durable()
        return answer

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        hosted = self._registry.all()
        answer = pb.ListRunsResponse(runs=[each.shown() for each in hosted])
        for each in hosted:
            await each.durable()
        return answer

    async def UpdateRun(self, request: pb.UpdateRunRequest, context: Context) -> pb.UpdateRunResponse:
        hosted, _ = self._admitted(request)
        base = hosted.run.next_config
        changed = replace(
            base, switch=switch_from_proto(request.switch, base.switch), policy=request.policy or base.policy
        )
        self._registry.update(hosted, changed)
        answer = pb.UpdateRunResponse(run=hosted.shown())
        await hosted.durable()
        return answer

    def _admitted(self, request: Any) -> tuple[HostedRun, TrainerCalls]:
        """The run that a trainer's call is for, and the calls of its trainer, unless the call is refused."""
        hosted = self._registry.get(request.run_id)
        hosted.admit(request.epoch)
        return hosted, self._registry.calls(request.run_id)

    # -------------------------------------------------------------------------------------------------- steps

    async def BeginStep(self, request: pb.BeginStepRequest, context: Context) -> pb.BeginStepResponse:
        hosted, calls = self._admitted(request)
        return cast(pb.BeginStepResponse, await hosted.call(calls.begin_step(request)))

    async def PrepareStep(
        self, request: pb.PrepareStepRequest, context: Context
    ) -> AsyncIterator[pb.PrepareStepResponse]:
        _, calls = self._admitted(request)
        async with aclosing(calls.preparing_step(request, _budget(request, context))) as heard:
            async for event in heard:
                yield event if isinstance(event, pb.PrepareStepResponse) else pb.PrepareStepResponse(**_named(event))

    async def BeginSample(
        self, request: pb.BeginSampleRequest, context: Context
    ) -> AsyncIterator[pb.BeginSampleResponse]:
        _, calls = self._admitted(request)
        async with aclosing(calls.beginning_sample(request, _budget(request, context))) as heard:
            async for event in heard:
                yield event if isinstance(event, pb.BeginSampleResponse) else pb.BeginSampleResponse(**_named(event))

    async def EndSample(self, request: pb.EndSampleRequest, context: Context) -> pb.EndSampleResponse:
        hosted, calls = self._admitted(request)
        return cast(pb.EndSampleResponse, await hosted.call(calls.end_sample(request)))

    async def EndStep(self, request: pb.EndStepRequest, context: Context) -> pb.EndStepResponse:
        hosted, calls = self._admitted(request)
        return cast(pb.EndStepResponse, await hosted.call(calls.end_step(request)))

    async def BeginValidation(self, request: pb.BeginValidationRequest, context: Context) -> pb.BeginValidationResponse:
        hosted, calls = self._admitted(request)
        return cast(pb.BeginValidationResponse, await hosted.call(calls.begin_validation(request)))

    async def EndValidation(self, request: pb.EndValidationRequest, context: Context) -> pb.EndValidationResponse:
        hosted, calls = self._admitted(request)
        return cast(pb.EndValidationResponse, await hosted.call(calls.end_validation(request)))

    # -------------------------------------------------------------------------------------------------- lends

    async def CompleteLend(self, request: pb.CompleteLendRequest, context: Context) -> pb.CompleteLendResponse:
        hosted, calls = self._admitted(request)
        lends, call = hosted.run.lends, calls.complete_lend(request)
        lend, stored = lends.get(request.lend_id), hosted.run.order.answer(call.key, call.content)
        if lend is not None or stored is not None:
            return cast(pb.CompleteLendResponse, await hosted.call(call))
        cost_s = lends.cost_of(request.lend_id)
        if cost_s is None:
            raise lend_closed(request.lend_id, "abandoned")
        await hosted.durable()
        return completed_lend(CompletedLend(cost_s))

    async def AbandonLend(self, request: pb.AbandonLendRequest, context: Context) -> pb.AbandonLendResponse:
        hosted, calls = self._admitted(request)
        run, call = hosted.run, calls.abandon_lend(request)
        lend, stored = run.lends.get(request.lend_id), run.order.answer(call.key, call.content)
        if lend is not None or stored is not None:
            return cast(pb.AbandonLendResponse, await hosted.call(call))
        if run.lends.cost_of(request.lend_id) is not None:
            raise lend_closed(request.lend_id, "completed")
        await hosted.durable()
        return pb.AbandonLendResponse(mode=run.mode)  # type: ignore[arg-type]

    # --------------------------------------------------------------------------------------------------- care

    async def Save(self, request: pb.SaveRequest, context: Context) -> pb.SaveResponse:
        hosted, calls = self._admitted(request)
        return cast(pb.SaveResponse, await hosted.call(calls.save(request)))

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        hosted, _ = self._admitted(request)
        return pb.HeartbeatResponse(lease=duration_of(self._registry.heartbeat(hosted)))

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        hosted = self._registry.get(request.run_id)
        run, log = hosted.run, hosted.run.log
        start = max(1, request.from_sequence) if request.HasField("from_sequence") else log.last + 1
        grew = asyncio.Event()
        stop = log.listen(grew.set)
        try:
            # The caller knows now that nothing from here on is missed, though there may be no event for long.
            await context.send_initial_metadata(())
            while True:
                grew.clear()
                while placed := log.read(start, _WATCH_BATCH):
                    # What a crash could take back is told to nobody.
                    await hosted.durable()
                    yield pb.WatchRunResponse(events=[event_to_proto(event) for event in placed])
                    start = placed[-1].sequence + 1
                if request.no_follow or not run.is_open:
                    return
                await self._tools.draining.race(grew.wait())
        finally:
            stop()


def _budget(request: Any, context: Context) -> float:
    return wait_budget(optional_s(request, "max_wait"), context.time_remaining())


def _named(event: Event) -> dict[str, Any]:
    return {"refill_due" if isinstance(event, buffer_pb2.RefillDue) else "progress": event}
