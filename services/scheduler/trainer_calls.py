"""A trainer's requests as calls of its run: what each says, and the work that answers it.

Invariant: a call made from the same request is the same call, with the same work, whether the trainer repeats it or the
run goes on with it by itself after a restart.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from google.protobuf.message import Message

from services.runtime.errors import invalid_argument, require_non_negative
from services.runtime.idempotency import fingerprint
from services.runtime.waits import duration_seconds
from services.scheduler import answers
from services.scheduler.checkpoints import Checkpoints
from services.scheduler.domain.calls import Call, CallKey
from services.scheduler.domain.sync import Sync
from services.scheduler.hosted import Answered, HostedRun, TrainerCall
from services.scheduler.steps import Steps
from services.scheduler.undertaking import Undertaking
from services.scheduler.waiting import Event, Wait
from turnout.scheduler.v1 import scheduler_pb2 as pb

A = TypeVar("A")

REQUESTS: Final[dict[Call, type[Message]]] = {call: getattr(pb, f"{call.value}Request") for call in Call}
RESPONSES: Final[dict[Call, type[Message]]] = {call: getattr(pb, f"{call.value}Response") for call in Call}
"""Of a stream: its messages, the last of which is the answer."""


def content_of(request: Message) -> bytes:
    """What a repeat must say again."""
    return fingerprint(request, ignore=("max_wait",) if "max_wait" in request.DESCRIPTOR.fields_by_name else ())


def optional_s(message: Any, field: str) -> float | None:
    """A duration in seconds, None if it is not set."""
    return duration_seconds(getattr(message, field), field) if message.HasField(field) else None


async def _told(answering: Awaitable[Answered], tell: Callable[[A], Message]) -> Answered:
    answered = await answering
    return replace(answered, answer=tell(cast(A, answered.answer)))


def _sync(request: Any, role: str) -> Sync | None:
    """What is told of the update of a role, None if there was none."""
    seconds = optional_s(request, f"{role}_update")
    if seconds is None:
        return None
    if not request.HasField(f"{role}_cost"):
        return Sync(seconds)
    cost = getattr(request, f"{role}_cost")
    tokens = require_non_negative(f"{role}_cost.tokens_recomputed", cost.tokens_recomputed)
    return Sync(seconds, tokens, optional_s(cost, "blackout") or 0.0)


class TrainerCalls:
    """The calls of one hosted run's trainer."""

    def __init__(self, hosted: HostedRun, checkpoints: Checkpoints) -> None:
        self._hosted = hosted
        self._checkpoints = checkpoints
        self.steps = Steps(hosted)

    # --------------------------------------------------------------------------------------------------- steps

    def begin_step(self, request: pb.BeginStepRequest) -> TrainerCall:
        """BeginStep."""
        sync = _sync(request, "standalone")
        key = CallKey(Call.BEGIN_STEP, request.step)
        return _call(
            key, request, lambda call: _told(self.steps.begin_step(call, request.step, sync), answers.began_step)
        )

    def prepare_step(self, request: pb.PrepareStepRequest) -> TrainerCall:
        """PrepareStep, with nobody who follows its wait."""
        return self._prepare_step(request, self.steps.wait_for_step(request.step, request.cursor))

    def _prepare_step(self, request: pb.PrepareStepRequest, wait: Wait) -> TrainerCall:
        key = CallKey(Call.PREPARE_STEP, request.step, attempt=request.attempt)
        return _call(
            key,
            request,
            lambda call: _told(self.steps.prepare_step(call, request.cursor, wait), answers.prepared_step),
        )

    def preparing_step(
        self, request: pb.PrepareStepRequest, budget_s: float
    ) -> AsyncGenerator[Event | pb.PrepareStepResponse, None]:
        """The events of PrepareStep's wait, then its answer."""
        wait = self.steps.wait_for_step(request.step, request.cursor)
        heard = self.steps.waiting(wait, budget_s, functools.partial(self._prepare_step, request))
        return cast("AsyncGenerator[Event | pb.PrepareStepResponse, None]", heard)

    def begin_sample(self, request: pb.BeginSampleRequest) -> TrainerCall:
        """BeginSample, with nobody who follows its wait."""
        return self._begin_sample(request, self.steps.wait_for_sample(request.step, request.mini_batch, request.cursor))

    def _begin_sample(self, request: pb.BeginSampleRequest, wait: Wait) -> TrainerCall:
        key = CallKey(Call.BEGIN_SAMPLE, request.step, request.mini_batch, request.attempt)
        return _call(
            key, request, lambda call: _told(self.steps.begin_sample(call, request.cursor, wait), answers.began_sample)
        )

    def beginning_sample(
        self, request: pb.BeginSampleRequest, budget_s: float
    ) -> AsyncGenerator[Event | pb.BeginSampleResponse, None]:
        """The events of BeginSample's wait, then its answer."""
        wait = self.steps.wait_for_sample(request.step, request.mini_batch, request.cursor)
        heard = self.steps.waiting(wait, budget_s, functools.partial(self._begin_sample, request))
        return cast("AsyncGenerator[Event | pb.BeginSampleResponse, None]", heard)

    def end_sample(self, request: pb.EndSampleRequest) -> TrainerCall:
        """EndSample."""
        wait_s = optional_s(request, "wait")
        if wait_s is None:
            raise invalid_argument("wait", "wait is required: the time the trainer waited for its data")
        tokens = require_non_negative("tokens", request.tokens) if request.HasField("tokens") else None
        key = CallKey(Call.END_SAMPLE, request.step, request.mini_batch)
        return _call(
            key,
            request,
            lambda call: _told(self.steps.end_sample(call, wait_s, tokens), lambda _: pb.EndSampleResponse()),
        )

    def end_step(self, request: pb.EndStepRequest) -> TrainerCall:
        """EndStep."""
        key = CallKey(Call.END_STEP, request.step)
        return _call(key, request, lambda call: _told(self.steps.end_step(call, request.step), answers.ended_step))

    def begin_validation(self, request: pb.BeginValidationRequest) -> TrainerCall:
        """BeginValidation."""
        key = CallKey(Call.BEGIN_VALIDATION, request.step)
        return _call(
            key,
            request,
            lambda call: _told(self.steps.begin_validation(call, request.step), answers.began_validation),
        )

    def end_validation(self, request: pb.EndValidationRequest) -> TrainerCall:
        """EndValidation."""
        key = CallKey(Call.END_VALIDATION, request.step)
        return _call(
            key,
            request,
            lambda call: _told(self.steps.end_validation(request.step), lambda _: pb.EndValidationResponse()),
        )

    # -------------------------------------------------------------------------------------------------- lends

    def complete_lend(self, request: pb.CompleteLendRequest) -> TrainerCall:
        """CompleteLend of a lend that is open."""
        lends, key = self._hosted.run.lends, CallKey(Call.COMPLETE_LEND, lend_id=request.lend_id)
        hybrid, standalone = _sync(request, "hybrid") or Sync(0.0), _sync(request, "standalone")

        async def work(call: Undertaking) -> Answered:
            lend = lends.require(request.lend_id)
            return await _told(self.steps.complete_lend(lend, hybrid, standalone), answers.completed_lend)

        return _call(key, request, work)

    def abandon_lend(self, request: pb.AbandonLendRequest) -> TrainerCall:
        """AbandonLend of a lend that is open."""
        run, key = self._hosted.run, CallKey(Call.ABANDON_LEND, lend_id=request.lend_id)

        async def work(call: Undertaking) -> Answered:
            lend = run.lends.require(request.lend_id)
            return await _told(
                self.steps.abandon_lend(lend, request.reason),
                lambda _: pb.AbandonLendResponse(mode=run.mode),  # type: ignore[arg-type]
            )

        return _call(key, request, work)

    def save(self, request: pb.SaveRequest) -> TrainerCall:
        """Save."""
        key = CallKey(Call.SAVE, request.step)
        return _call(key, request, lambda call: self._checkpoints.save(self._hosted, call, request.step))

    # ------------------------------------------------------------------------------------------------- resuming

    def resumed(self, undertaking: Undertaking) -> TrainerCall:
        """The call that an earlier process was working on."""
        call = undertaking.key.call
        request: Any = REQUESTS[call].FromString(undertaking.request)
        return cast(TrainerCall, getattr(self, call.name.lower())(request))


def _call(key: CallKey, request: Message, work: Callable[[Undertaking], Awaitable[Answered]]) -> TrainerCall:
    return TrainerCall(key, content_of(request), request.SerializeToString(), work)
