"""Operations on the wire."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from services.engine.domain.operations import Operation, Outcome, OutcomeKind, Shard
from services.engine.wire.enums import OPERATION_STATES, OUTCOME_KINDS
from services.runtime.errors import Code, TurnoutError
from turnout.engine.v1 import engine_pb2 as pb


def write_duration(seconds: float) -> Duration:
    """Seconds as a Duration, to the microsecond."""
    duration = Duration()
    duration.FromMicroseconds(round(seconds * 1e6))
    return duration


def write_operation(operation: Operation) -> pb.Operation:
    """An operation as it travels."""
    started_at = Timestamp()
    started_at.FromMicroseconds(round(operation.started_at * 1e6))
    return pb.Operation(
        operation_id=operation.operation_id,
        kind=operation.kind,
        state=OPERATION_STATES.write(operation.state),
        outcomes=[write_outcome(operation.outcomes[key]) for key in sorted(operation.outcomes)],
        started_at=started_at,
        duration=None if operation.duration is None else write_duration(operation.duration),
    )


def read_operation(operation: pb.Operation) -> Operation:
    """An operation as it was written."""
    return Operation(
        operation.operation_id,
        operation.kind,
        operation.started_at.ToMicroseconds() / 1e6,
        {outcome.replica_id: read_outcome(outcome) for outcome in operation.outcomes},
        operation.duration.ToMicroseconds() / 1e6 if operation.HasField("duration") else None,
    )


def write_outcome(outcome: Outcome) -> pb.ReplicaOutcome:
    """An outcome as it travels."""
    return pb.ReplicaOutcome(
        replica_id=outcome.replica_id,
        kind=OUTCOME_KINDS.write(outcome.kind),
        code=int(outcome.code),
        reason=outcome.reason,
        message=outcome.message,
        duration=None if outcome.kind is OutcomeKind.PENDING else write_duration(outcome.duration),
        bytes_freed=outcome.bytes_freed,
        method=outcome.method,
        shards=[pb.ShardOutcome(shard=s.shard, ok=s.ok, result_json=s.result_json) for s in outcome.shards],
    )


def read_outcome(outcome: pb.ReplicaOutcome) -> Outcome:
    """An outcome as it was written."""
    return Outcome(
        outcome.replica_id,
        OUTCOME_KINDS.read("kind", outcome.kind),
        Code(outcome.code),
        outcome.reason,
        outcome.message,
        outcome.duration.ToMicroseconds() / 1e6,
        outcome.bytes_freed if outcome.HasField("bytes_freed") else None,
        outcome.method,
        read_shards(outcome.shards),
    )


def read_shards(shards: Iterable[pb.ShardOutcome]) -> tuple[Shard, ...]:
    """What the shards answered."""
    return tuple(Shard(shard.shard, shard.ok, shard.result_json) for shard in shards)


def read_failure(outcome: pb.ReplicaOutcome) -> TurnoutError:
    """The error of a replica that did not do it."""
    return TurnoutError(Code(outcome.code), outcome.reason, outcome.message, {"replica_id": outcome.replica_id})
