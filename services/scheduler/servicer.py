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
from google.protobuf.message import Message

from services.runtime.errors import invalid_argument, require_non_negative
from services.runtime.idempotency import fingerprint
from services.runtime.waits import duration_of, duration_seconds, wait_budget
from services.scheduler.checkpoints import SavedRun
from services.scheduler.convert import (
    config_from_proto,
    decision_to_proto,
    lend_to_proto,
    resume_from_proto,
    run_to_proto,
    switch_from_proto,
)
from services.scheduler.convert_events import event_to_proto
from services.scheduler.domain.calls import Call, CallKey
from services.scheduler.domain.lends import Lend, lend_closed
from services.scheduler.hosted import HostedRun, Tools
from services.scheduler.opening import Opened, Opening
from services.scheduler.registry import Registry
from services.scheduler.steps import BeganStep, CompletedLend, EndedStep, Prepared, Sampled, Steps
from services.scheduler.waiting import Event
from turnout.buffer.v1 import buffer_pb2
from turnout.scheduler.v1 import events_pb2, scheduler_pb2_grpc
from turnout.scheduler.v1 import scheduler_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]

_WATCH_BATCH = 500
"""Events in one message of WatchRun: far below the 4 MiB that many clients accept, also when they hold progress."""


def _optional_s(message: Any, field: str) -> float | None:
    return duration_seconds(getattr(message, field), field) if message.HasField(field) else None


def _content(request: Message) -> bytes:
    """What a repeat must say again."""
    return fingerprint(request, ignore=("max_wait",) if "max_wait" in request.DESCRIPTOR.fields_by_name else ())


class SchedulerServicer(scheduler_pb2_grpc.SwitchSchedulerServicer):
    """Answers the calls of turnout.scheduler.v1.SwitchScheduler."""

    def __init__(self, registry: Registry, tools: Tools, incarnation: str) -> None:
        self._registry = registry
        self._tools = tools
        self._incarnation = incarnation
        self._opened: dict[str, tuple[Opened, pb.OpenRunResponse]] = {}
        """What was answered to the OpenRun that holds, by run: a repeat gets the same."""

    # --------------------------------------------------------------------------------------------------- runs

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.OpenRunResponse:
        opening = Opening(
            request.run_id,
            config_from_proto(request.config),
            request.buffer_target,
            request.engine_target,
            resume_from_proto(request),
            request.take_over,
            request.request_id,
            fingerprint(request),
        )
        opened = await self._registry.open(opening)
        before, answer = self._opened.get(request.run_id, (None, None))
        if before is opened and answer is not None:
            return answer
        answer = pb.OpenRunResponse(
            epoch=opened.epoch,
            lend=None if opened.lend is None else _init_lend(opened.lend),
            warmup_groups=opened.warmup_groups,
            next_step=opened.next_step,
            run=self._run(opened.hosted),
            allow_older=opened.allow_older,
            time_scale=self._tools.clock.scale,
            cursor=opened.cursor,
        )
        self._opened = {run_id: kept for run_id, kept in self._opened.items() if run_id in self._registry}
        self._opened[request.run_id] = (opened, answer)
        return answer

    async def CloseRun(self, request: pb.CloseRunRequest, context: Context) -> pb.CloseRunResponse:
        await self._registry.close_run(request.run_id, request.epoch, request.reason)
        return pb.CloseRunResponse()

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self._run(self._registry.get(request.run_id)), incarnation=self._incarnation)

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=[self._run(hosted) for hosted in self._registry.all()])

    async def UpdateRun(self, request: pb.UpdateRunRequest, context: Context) -> pb.UpdateRunResponse:
        hosted, _ = self._admitted(request)
        base = hosted.run.next_config
        changed = replace(
            base, switch=switch_from_proto(request.switch, base.switch), policy=request.policy or base.policy
        )
        self._registry.update(hosted, changed)
        return pb.UpdateRunResponse(run=self._run(hosted))

    def _run(self, hosted: HostedRun) -> pb.Run:
        clock = self._tools.clock
        return run_to_proto(hosted.run, clock.now(), clock.scale, hosted.buffer.target, hosted.engine.target)

    def _admitted(self, request: Any) -> tuple[HostedRun, Steps]:
        """The run that a trainer's call is for, and what its calls do, unless the call is refused."""
        hosted = self._registry.get(request.run_id)
        hosted.admit(request.epoch)
        return hosted, self._registry.steps(request.run_id)

    # -------------------------------------------------------------------------------------------------- steps

    async def BeginStep(self, request: pb.BeginStepRequest, context: Context) -> pb.BeginStepResponse:
        hosted, steps = self._admitted(request)
        update_s = _optional_s(request, "standalone_update")
        key = CallKey(Call.BEGIN_STEP, request.step)
        answer = await hosted.call(key, _content(request), lambda: steps.begin_step(request.step, update_s))
        began = cast(BeganStep, answer)
        return pb.BeginStepResponse(
            mode=began.mode,  # type: ignore[arg-type]
            reclaimed=began.reclaimed,
            decision=decision_to_proto(began.decision),
        )

    async def PrepareStep(
        self, request: pb.PrepareStepRequest, context: Context
    ) -> AsyncIterator[pb.PrepareStepResponse]:
        _, steps = self._admitted(request)
        key = CallKey(Call.PREPARE_STEP, request.step, attempt=request.attempt)
        heard = steps.prepare_step(key, _content(request), request.cursor, _budget(request, context))
        async with aclosing(heard):
            async for event in heard:
                if isinstance(event, Prepared):
                    yield pb.PrepareStepResponse(done=_prepared(event))
                else:
                    yield pb.PrepareStepResponse(**_named(event))

    async def BeginSample(
        self, request: pb.BeginSampleRequest, context: Context
    ) -> AsyncIterator[pb.BeginSampleResponse]:
        _, steps = self._admitted(request)
        key = CallKey(Call.BEGIN_SAMPLE, request.step, request.mini_batch, request.attempt)
        heard = steps.begin_sample(key, _content(request), request.cursor, _budget(request, context))
        async with aclosing(heard):
            async for event in heard:
                if isinstance(event, Sampled):
                    yield pb.BeginSampleResponse(done=_sampled(event))
                else:
                    yield pb.BeginSampleResponse(**_named(event))

    async def EndSample(self, request: pb.EndSampleRequest, context: Context) -> pb.EndSampleResponse:
        hosted, steps = self._admitted(request)
        wait_s = _optional_s(request, "wait")
        if wait_s is None:
            raise invalid_argument("wait", "wait is required: the time the trainer waited for its data")
        tokens = require_non_negative("tokens", request.tokens) if request.HasField("tokens") else None
        key = CallKey(Call.END_SAMPLE, request.step, request.mini_batch)
        await hosted.call(key, _content(request), lambda: steps.end_sample(key, wait_s, tokens))
        return pb.EndSampleResponse()

    async def EndStep(self, request: pb.EndStepRequest, context: Context) -> pb.EndStepResponse:
        hosted, steps = self._admitted(request)
        key = CallKey(Call.END_STEP, request.step)
        answer = await hosted.call(key, _content(request), lambda: steps.end_step(request.step))
        ended = cast(EndedStep, answer)
        return pb.EndStepResponse(
            lend=None if ended.lend is None else lend_to_proto(ended.lend),
            decision=decision_to_proto(ended.decision),
            metrics=dict(ended.metrics),
            lend_failure=ended.lend_failure,
        )

    async def BeginValidation(self, request: pb.BeginValidationRequest, context: Context) -> pb.BeginValidationResponse:
        hosted, steps = self._admitted(request)
        key = CallKey(Call.BEGIN_VALIDATION, request.step)
        lend = await hosted.call(key, _content(request), lambda: steps.begin_validation(request.step))
        return pb.BeginValidationResponse(lend=lend_to_proto(lend) if isinstance(lend, Lend) else None)

    async def EndValidation(self, request: pb.EndValidationRequest, context: Context) -> pb.EndValidationResponse:
        hosted, steps = self._admitted(request)
        key = CallKey(Call.END_VALIDATION, request.step)
        await hosted.call(key, _content(request), lambda: steps.end_validation(request.step))
        return pb.EndValidationResponse()

    # -------------------------------------------------------------------------------------------------- lends

    async def CompleteLend(self, request: pb.CompleteLendRequest, context: Context) -> pb.CompleteLendResponse:
        hosted, steps = self._admitted(request)
        run = hosted.run
        hybrid_s = _optional_s(request, "hybrid_update") or 0.0
        standalone_s = _optional_s(request, "standalone_update")
        key = CallKey(Call.COMPLETE_LEND, lend_id=request.lend_id)
        lend = run.lends.get(request.lend_id)
        answer = run.order.answer(key, _content(request))
        if lend is not None:
            work = lambda: steps.complete_lend(lend, hybrid_s, standalone_s)  # noqa: E731
            answer = await hosted.call(key, _content(request), work)
        elif answer is None:
            cost_s = run.lends.cost_of(request.lend_id)
            if cost_s is None:
                raise lend_closed(request.lend_id, "abandoned")
            answer = CompletedLend(cost_s)
        completed = cast(CompletedLend, answer)
        return pb.CompleteLendResponse(
            mode=events_pb2.MODE_ROLLOUT,
            cost=duration_of(completed.cost_s),
            metrics=dict(completed.metrics),
            failed_replica_ids=completed.failed,
        )

    async def AbandonLend(self, request: pb.AbandonLendRequest, context: Context) -> pb.AbandonLendResponse:
        hosted, steps = self._admitted(request)
        run = hosted.run
        lend = run.lends.get(request.lend_id)
        if lend is not None:
            key = CallKey(Call.ABANDON_LEND, lend_id=request.lend_id)
            await hosted.call(key, _content(request), lambda: steps.abandon_lend(lend, request.reason))
        elif run.lends.cost_of(request.lend_id) is not None:
            raise lend_closed(request.lend_id, "completed")
        return pb.AbandonLendResponse(mode=run.mode)  # type: ignore[arg-type]

    # --------------------------------------------------------------------------------------------------- care

    async def Save(self, request: pb.SaveRequest, context: Context) -> pb.SaveResponse:
        hosted, _ = self._admitted(request)
        key = CallKey(Call.SAVE, request.step)
        answer = await hosted.call(
            key, _content(request), lambda: self._registry.checkpoints.save(hosted, request.step)
        )
        saved = cast(SavedRun, answer)
        return pb.SaveResponse(checkpoint_id=saved.checkpoint_id, manifest_json=saved.manifest_json)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        hosted, _ = self._admitted(request)
        return pb.HeartbeatResponse(lease=duration_of(await self._registry.heartbeat(hosted)))

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        run = self._registry.get(request.run_id).run
        log = run.log
        start = max(1, request.from_sequence) if request.HasField("from_sequence") else log.last + 1
        grew = asyncio.Event()
        stop = log.listen(grew.set)
        try:
            # The caller knows now that nothing from here on is missed, though there may be no event for long.
            await context.send_initial_metadata(())
            while True:
                grew.clear()
                while placed := log.read(start, _WATCH_BATCH):
                    yield pb.WatchRunResponse(events=[event_to_proto(event) for event in placed])
                    start = placed[-1].sequence + 1
                if request.no_follow or not run.is_open:
                    return
                await self._tools.draining.race(grew.wait())
        finally:
            stop()


def _budget(request: Any, context: Context) -> float:
    return wait_budget(_optional_s(request, "max_wait"), context.time_remaining())


def _init_lend(lend: Lend) -> pb.Lend:
    message = lend_to_proto(lend)
    # All hybrids that are registered before CompleteLend take part, those still to come too.
    del message.replica_ids[:]
    return message


def _named(event: Event) -> dict[str, Any]:
    return {"refill_due" if isinstance(event, buffer_pb2.RefillDue) else "progress": event}


def _prepared(prepared: Prepared) -> pb.PrepareStepDone:
    done = prepared.done
    return pb.PrepareStepDone(
        outcome=prepared.outcome,
        mode=prepared.mode,  # type: ignore[arg-type]
        reclaimed=prepared.reclaimed,
        evictions=None if done is None else done.evictions,
        next_cursor=prepared.cursor,
        metrics=dict(prepared.metrics),
        decision=decision_to_proto(prepared.decision),
        reason=prepared.reason,
    )


def _sampled(sampled: Sampled) -> pb.BeginSampleDone:
    message = pb.BeginSampleDone(
        evictions=None if sampled.done is None else sampled.done.evictions,
        next_cursor=sampled.cursor,
        decision=decision_to_proto(sampled.decision),
    )
    if sampled.lend is not None:
        message.lend.CopyFrom(lend_to_proto(sampled.lend))
    elif sampled.timed_out:
        message.timed_out.reason = sampled.timed_out
    else:
        proceed = message.proceed
        proceed.SetInParent()
        proceed.sampleable = sampled.sampleable
        if sampled.reclaim_s is not None:
            proceed.reclaim.CopyFrom(duration_of(sampled.reclaim_s))
        if sampled.outcome is not None:
            proceed.outcome = sampled.outcome
        proceed.reason = sampled.reason
    return message
