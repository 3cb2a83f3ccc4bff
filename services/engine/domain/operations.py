"""Operations: what each replica did in a fan-out or transition.

Invariants: an operation ends once, when no outcome is pending; it has SUCCEEDED only if every outcome is DONE or
SKIPPED; the newest `KEPT_OPERATIONS` are remembered, and a running one is never forgotten before it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from services.runtime.errors import Code, TurnoutError, aborted, invalid_argument, not_found

KEPT_OPERATIONS: Final = 10_000
"""The contract's promise; a few megabytes, and about a day of switching every few seconds."""

NAMED_FAILURES: Final = 16
"""Failures that an error names; the rest is read with GetOperation, since trailers are small."""

GRAVITY: Final = (
    Code.DEADLINE_EXCEEDED,
    Code.UNAVAILABLE,
    Code.DATA_LOSS,
    Code.ABORTED,
    Code.FAILED_PRECONDITION,
)
"""From the gravest: what may still be under way, what is gone, what got in between, what was refused."""


class OperationState(Enum):
    """How far an operation is."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    PARTIAL = "partial"


class OutcomeKind(Enum):
    """What one replica did."""

    PENDING = "pending"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Shard:
    """What one shard of a replica answered."""

    shard: int
    ok: bool
    result_json: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one replica did. `duration` is in wall seconds."""

    replica_id: str
    kind: OutcomeKind = OutcomeKind.PENDING
    code: Code = Code.OK
    reason: str = ""
    message: str = ""
    duration: float = 0.0
    bytes_freed: int | None = None
    method: str = ""
    shards: tuple[Shard, ...] = ()

    @classmethod
    def failed(cls, replica_id: str, error: TurnoutError, duration: float, shards: tuple[Shard, ...] = ()) -> Outcome:
        """The outcome of a replica that did not do it."""
        return cls(replica_id, OutcomeKind.FAILED, error.code, error.reason, error.message, duration, shards=shards)


@dataclass(frozen=True, slots=True)
class Origin:
    """The repeatable call that began an operation; `fingerprint` tells it from another with that request_id."""

    call: str
    request_id: str
    fingerprint: bytes


@dataclass(slots=True)
class Operation:
    """One fan-out or transition. Times are Unix seconds and wall durations."""

    operation_id: str
    kind: str
    started_at: float
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    duration: float | None = None
    origin: Origin | None = None

    def settle(self, outcome: Outcome) -> None:
        """Record what a replica did; only a pending outcome changes."""
        if self.outcomes[outcome.replica_id].kind is OutcomeKind.PENDING:
            self.outcomes[outcome.replica_id] = outcome

    def reopen(self) -> list[str]:
        """Go on with what failed; returns the replicas that are left."""
        left = [failure.replica_id for failure in self.failures]
        for replica_id in left:
            self.outcomes[replica_id] = Outcome(replica_id)
        self.duration = None
        return left

    def end(self, duration: float) -> None:
        """Every replica has its outcome."""
        self.duration = duration

    def interrupt(self, wall: float) -> None:
        """The controller died during it: what those did that have no outcome is not known."""
        if self.duration is not None:
            return
        for replica_id, outcome in self.outcomes.items():
            if outcome.kind is OutcomeKind.PENDING:
                why = "the controller ended during the call; what the engine did of it is not known"
                self.outcomes[replica_id] = Outcome.failed(replica_id, aborted("INTERRUPTED", why), 0.0)
        self.end(max(0.0, wall - self.started_at))

    @property
    def pending(self) -> bool:
        """Whether some replica has no outcome yet."""
        return any(outcome.kind is OutcomeKind.PENDING for outcome in self.outcomes.values())

    @property
    def failures(self) -> list[Outcome]:
        """The outcomes of those that did not do it, by id."""
        return [self.outcomes[key] for key in sorted(self.outcomes) if self.outcomes[key].kind is OutcomeKind.FAILED]

    @property
    def state(self) -> OperationState:
        if self.duration is None:
            return OperationState.RUNNING
        return OperationState.PARTIAL if self.failures else OperationState.SUCCEEDED

    def error(self) -> TurnoutError | None:
        """PARTIAL with the gravest code among the failures, or None if there is none."""
        failures = self.failures
        if not failures:
            return None
        codes = {failure.code for failure in failures}
        code = next((grave for grave in GRAVITY if grave in codes), Code.FAILED_PRECONDITION)
        metadata: dict[str, object] = {"operation_id": self.operation_id, "failed": len(failures)}
        for position, failure in enumerate(failures[:NAMED_FAILURES]):
            metadata[f"failure.{position}"] = f"{failure.replica_id}: {failure.reason}"
        message = (
            f"{self.kind}: {len(failures)} of {len(self.outcomes)} replicas failed, the first: {failures[0].message}"
        )
        return TurnoutError(code, "PARTIAL", message, metadata)


class OperationLog:
    """The newest operations, by id and in order."""

    def __init__(self, prefix: str, kept: int = KEPT_OPERATIONS) -> None:
        self._prefix = prefix
        self._kept = kept
        self._next = 1
        self._by_number: dict[int, Operation] = {}

    def begin(self, kind: str, replica_ids: Iterable[str], wall: float) -> Operation:
        """Open an operation over these replicas."""
        number = self._next
        self._next += 1
        outcomes = {replica_id: Outcome(replica_id) for replica_id in sorted(replica_ids)}
        operation = Operation(f"{self._prefix}-{number}", kind, wall, outcomes)
        self._by_number[number] = operation
        while len(self._by_number) > self._kept:
            oldest = next((n for n, known in self._by_number.items() if known.duration is not None), None)
            if oldest is None:
                break
            del self._by_number[oldest]
        return operation

    def restore(self, operations: Iterable[Operation]) -> None:
        """Remember operations of earlier controllers, oldest first."""
        for operation in operations:
            number = int(operation.operation_id.rpartition("-")[2])
            self._by_number[number] = operation
            self._next = max(self._next, number + 1)
        for number in list(self._by_number)[: -self._kept]:
            del self._by_number[number]

    @property
    def all(self) -> Iterable[Operation]:
        """Those that are remembered, oldest first."""
        return self._by_number.values()

    def get(self, operation_id: str) -> Operation:
        """The operation, or NOT_FOUND / OPERATION_NOT_FOUND."""
        number = operation_id.rpartition("-")[2]
        found = self._by_number.get(int(number)) if number.isascii() and number.isdecimal() else None
        if found is None or found.operation_id != operation_id:
            raise not_found("OPERATION_NOT_FOUND", f"no operation {operation_id!r}", operation_id=operation_id)
        return found

    def page(self, size: int, token: str) -> tuple[list[Operation], str]:
        """Operations, newest first, and the token of the next page."""
        if not 1 <= size <= 1000:
            raise invalid_argument("page_size", "a page holds 1 to 1000 operations", value=size)
        if token and not token.isdecimal():
            raise invalid_argument("page_token", "this is no token of this call", value=token)
        below = int(token) if token else self._next
        numbers = [number for number in reversed(self._by_number) if number < below]
        page = numbers[:size]
        following = str(page[-1]) if len(numbers) > size else ""
        return [self._by_number[number] for number in page], following
