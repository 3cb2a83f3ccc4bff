"""What the calls answer, as messages.

Invariant: an answer is made once, when the call ends, and kept as the message, so that a repeat gets the very same.
"""

from __future__ import annotations

from services.runtime.waits import duration_of
from services.scheduler.convert import decision_to_proto, lend_to_proto
from services.scheduler.domain.lends import Lend
from services.scheduler.steps import BeganStep, CompletedLend, EndedStep, Prepared, Sampled
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb


def began_step(began: BeganStep) -> pb.BeginStepResponse:
    """What BeginStep answers."""
    return pb.BeginStepResponse(
        mode=began.mode,  # type: ignore[arg-type]
        reclaimed=began.reclaimed,
        decision=decision_to_proto(began.decision),
    )


def prepared_step(prepared: Prepared) -> pb.PrepareStepResponse:
    """The last message of PrepareStep."""
    done = prepared.done
    return pb.PrepareStepResponse(
        done=pb.PrepareStepDone(
            outcome=prepared.outcome,
            mode=prepared.mode,  # type: ignore[arg-type]
            reclaimed=prepared.reclaimed,
            evictions=None if done is None else done.evictions,
            next_cursor=prepared.cursor,
            metrics=dict(prepared.metrics),
            decision=decision_to_proto(prepared.decision),
            reason=prepared.reason,
        )
    )


def began_sample(sampled: Sampled) -> pb.BeginSampleResponse:
    """The last message of BeginSample."""
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
    return pb.BeginSampleResponse(done=message)


def ended_step(ended: EndedStep) -> pb.EndStepResponse:
    """What EndStep answers."""
    return pb.EndStepResponse(
        lend=None if ended.lend is None else lend_to_proto(ended.lend),
        decision=decision_to_proto(ended.decision),
        metrics=dict(ended.metrics),
        lend_failure=ended.lend_failure,
    )


def began_validation(lend: object) -> pb.BeginValidationResponse:
    """What BeginValidation answers; `lend` is no Lend if the GPUs serve already."""
    return pb.BeginValidationResponse(lend=lend_to_proto(lend) if isinstance(lend, Lend) else None)


def completed_lend(completed: CompletedLend) -> pb.CompleteLendResponse:
    """What CompleteLend answers."""
    return pb.CompleteLendResponse(
        mode=events_pb2.MODE_ROLLOUT,
        cost=duration_of(completed.cost_s),
        metrics=dict(completed.metrics),
        failed_replica_ids=completed.failed,
    )
