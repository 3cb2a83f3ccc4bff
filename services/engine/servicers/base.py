"""What all calls share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from services.engine.controller import Controller
from services.engine.domain.operations import Operation, Origin
from services.engine.fanout import Target
from services.engine.slot import Slot
from services.engine.wire.enums import ROLES
from services.engine.wire.operations import write_operation
from services.engine.wire.replicas import write_replica
from services.runtime.errors import TurnoutError, require_positive
from services.runtime.idempotency import Answer, fingerprint
from services.runtime.waits import duration_seconds
from turnout.engine.v1 import engine_pb2 as pb

M = TypeVar("M", bound=Message)
Operable = (
    pb.SleepRequest
    | pb.WakeUpRequest
    | pb.ReleaseKvCacheRequest
    | pb.ResumeKvCacheRequest
    | pb.PauseRequest
    | pb.ResumeRequest
    | pb.ResetCachesRequest
    | pb.CollectiveRpcRequest
)
"""Requests of operations that a repeat goes on with."""


class Calls:
    """A part of the servicer."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def _read(self, run_id: str) -> Controller:
        """The controller, for a call that only reads or that needs no epoch."""
        self._controller.fence.require_run(run_id)
        return self._controller

    def _select(self, selector: pb.ReplicaSelector) -> list[Slot]:
        roles = [ROLES.read("selector.roles", role) for role in selector.roles]
        return self._controller.fleet.select(selector.replica_ids, roles)

    def _command(self, run_id: str, epoch: int | None) -> Controller:
        """The controller, for a call that a trainer makes."""
        self._controller.fence.check(run_id, epoch)
        self._controller.draining.check()
        return self._controller

    def _timeout(self, duration: Duration | None) -> float:
        if duration is None:
            return self._controller.timeout(None)
        return require_positive("timeout", duration_seconds(duration, "timeout"))

    async def _operate(
        self, request: Operable, slots: Sequence[Slot], run: Callable[[Target], Awaitable[Operation]]
    ) -> pb.Operation:
        """Run an operation, or go on with the one that this request_id began; the answer is one that succeeded."""
        call = type(request).__name__.removesuffix("Request")
        content = _content(request)
        timeout = self._timeout(optional_timeout(request))

        async def execute() -> pb.Operation:
            partials = self._controller.partials
            origin = Origin(call, request.request_id, content)
            operation = await run(Target(slots, timeout, partials.find(origin), origin))
            partials.keep(operation)
            answer = write_operation(succeeded(operation))
            if self._controller.settings.agent:
                # Whoever commands an agent wants to know next what state its engine is in.
                answer.replicas.extend(self._write(slot) for slot in slots)
                answer.incarnation = self._controller.incarnation
            return answer

        return await self._once(request, request.request_id, execute)

    def _write(self, slot: Slot) -> pb.Replica:
        load = self._controller.fleet.placement.load(slot.replica_id)
        running = len(slot.forwards)
        return write_replica(slot, running, max(0, load - running))

    async def _once(self, request: Message, request_id: str, execute: Callable[[], Awaitable[M]]) -> M:
        """Execute a mutation, or give the answer that its request_id got before; it leaves once it is durable.

        A caller that goes away cancels nothing: its repeat gets the answer.
        """
        call = type(request).__name__.removesuffix("Request")
        return await self._repeatable(call, request_id, _content(request), execute)

    async def _repeatable(self, call: str, request_id: str, content: bytes, execute: Callable[[], Awaitable[M]]) -> M:
        controller = self._controller
        now = controller.clock.wall()

        async def recorded() -> M:
            answer = await execute()
            if request_id:
                controller.book.answer(call, request_id, Answer.of(call, content, now, answer))
            return answer

        async def once() -> M | TurnoutError:
            try:
                # There is one run, and ids are scoped to the call.
                return await controller.answers.once(call, call, request_id, content, now, recorded)
            except TurnoutError as error:
                return error

        answer = await asyncio.shield(controller.context.tasks.spawn(f"{call} {request_id}", once()))
        if isinstance(answer, TurnoutError):
            raise answer
        await controller.book.durable()
        return answer


def _content(request: Message) -> bytes:
    """What tells two requests apart; a repeat may come under another epoch or with more time."""
    if isinstance(request, pb.OpenEpochRequest):
        return fingerprint(request)  # its epoch is what it asks for, not the caller's
    names = {field.name for field in request.DESCRIPTOR.fields}
    return fingerprint(request, ignore=names & {"epoch", "timeout"})


def succeeded(operation: Operation) -> Operation:
    """The operation, if no replica failed; otherwise its PARTIAL error."""
    error = operation.error()
    if error is not None:
        raise error
    return operation


def optional_epoch(request: Message) -> int | None:
    """The epoch of a request that has the field."""
    epoch: int | None = getattr(request, "epoch") if request.HasField("epoch") else None  # noqa: B009
    return epoch


def optional_timeout(request: Message) -> Duration | None:
    """The timeout of a request that has the field."""
    timeout: Duration | None = getattr(request, "timeout") if request.HasField("timeout") else None  # noqa: B009
    return timeout
