"""Carries an action out on several replicas at once and records what each of them did.

Invariants: every selected replica gets an outcome; one that fails or hangs delays no other; an operation goes on when
whoever asked for it has gone, and its outcomes are settled one by one while it runs. Nothing reaches an engine before
it is durable that the operation began, nothing is told of it before it is durable how it ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.engine.book import Book
from services.engine.deadline import Deadline
from services.engine.domain.calls import Plan
from services.engine.domain.operations import Operation, OperationLog, Origin, Outcome, OutcomeKind, Shard
from services.engine.slot import Slot
from services.runtime.clock import Clock
from services.runtime.errors import TurnoutError, internal
from services.runtime.logs import get_logger
from services.runtime.tasks import Supervisor

ALREADY: Final = "ALREADY"
"""Reason of a skip: the replica already was as asked."""

_LOG = get_logger("engine")


@dataclass(frozen=True, slots=True)
class Result:
    """What an action did on one replica; `skipped` is the reason if there was nothing to do."""

    skipped: str = ""
    method: str = ""
    bytes_freed: int | None = None
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """Which replicas, and how many wall seconds each of them has.

    With `continues` an operation goes on, on those replicas alone that failed in it. `origin` is the call that asks.
    """

    slots: Sequence[Slot]
    timeout: float
    continues: Operation | None = None
    origin: Origin | None = None


Action = Callable[[Slot, Deadline], Awaitable[Result]]


class FanOut:
    """Runs operations."""

    def __init__(self, log: OperationLog, tasks: Supervisor, clock: Clock, book: Book) -> None:
        self.log = log
        self._book = book
        self._tasks = tasks
        self._clock = clock

    async def run(
        self,
        kind: str,
        target: Target,
        action: Action,
    ) -> Operation:
        """Run an action on all these replicas. Failures are in the operation."""
        slots, continues = target.slots, target.continues
        if continues is None:
            operation = self.log.begin(kind, (slot.replica_id for slot in slots), self._clock.wall())
            operation.origin = target.origin
        else:
            operation, left = continues, continues.reopen()
            slots = [slot for slot in slots if slot.replica_id in left]
            for gone in set(left) - {slot.replica_id for slot in slots}:
                operation.settle(Outcome(gone, OutcomeKind.SKIPPED, reason="DEREGISTERED"))
        self._book.operation(operation)
        started = time.monotonic()

        def settle(outcome: Outcome | None) -> None:
            if outcome is not None:
                operation.settle(outcome)
                self._book.settled(operation, outcome)
            if not operation.pending:
                # In the turn of the last outcome, so that one wait for the disk makes both durable.
                operation.end(time.monotonic() - started)
                self._book.ended(operation)

        async def one(slot: Slot) -> None:
            settle(await self._one(operation, slot, target.timeout, action))

        async def everywhere() -> None:
            if not slots:
                settle(None)
            await asyncio.gather(*(one(slot) for slot in slots))

        # Shielded: a caller that goes away takes nothing with it.
        await asyncio.shield(self._tasks.spawn(f"{kind} {operation.operation_id}", everywhere()))
        await self._book.durable()
        return operation

    async def _one(self, operation: Operation, slot: Slot, timeout: float, action: Action) -> Outcome:
        started = time.monotonic()
        try:
            await self._book.durable()
            result = await action(slot, Deadline(timeout))
        except TurnoutError as error:
            outcome = Outcome.failed(slot.replica_id, error, time.monotonic() - started, slot.shards)
            _LOG.warning("replica failed", call=operation.kind, replica_id=slot.replica_id, reason=error.reason)
        except Exception:
            _LOG.exception("action failed unexpectedly", call=operation.kind, replica_id=slot.replica_id)
            fault = internal("INTERNAL", f"{operation.kind} failed on {slot.replica_id}")
            outcome = Outcome.failed(slot.replica_id, fault, time.monotonic() - started)
        else:
            outcome = Outcome(
                slot.replica_id,
                OutcomeKind.SKIPPED if result.skipped else OutcomeKind.DONE,
                reason=result.skipped,
                duration=time.monotonic() - started,
                bytes_freed=result.bytes_freed,
                method=result.method,
                shards=result.shards,
            )
        return outcome


async def carry_out(slot: Slot, plan: Plan, deadline: Deadline) -> Result:
    """Make the calls of a plan and tell what it came to. The caller has the engine alone."""
    if plan.skipped:
        return Result(skipped=plan.skipped)
    if not plan.calls:
        return Result(skipped=ALREADY)
    before = slot.replica.state.memory_bytes
    await slot.carry_out(plan, deadline)
    after = slot.replica.state.memory_bytes
    freed = before - after if before is not None and after is not None and before > after else None
    return Result(method=plan.method, bytes_freed=freed, shards=slot.shards)
