"""The run's replay buffer, through its stub.

Invariant: every call that is no stream has a deadline.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

from services.runtime.errors import Code, TurnoutError, failed_precondition, invalid_argument, unavailable
from services.runtime.waits import duration_of
from services.scheduler.domain.run import Depth
from services.scheduler.links import Link, errors_of, stream_of
from turnout.buffer.v1 import buffer_pb2, buffer_pb2_grpc

T = TypeVar("T")

UNREACHABLE: Final = "BUFFER_UNREACHABLE"


def depth_of(depth: buffer_pb2.Depth) -> Depth:
    """A depth as the domain has it."""
    return Depth(
        step=depth.step,
        sampleable=depth.sampleable,
        in_flight=depth.counts.pending + depth.counts.running,
        unpaid_credits=depth.unpaid_credits,
        held=depth.HasField("hold"),
    )


@dataclass(frozen=True, slots=True)
class BufferState:
    """What OpenRun asks the buffer. `step`: the highest that its trainer's calls carried."""

    epoch: int
    step: int


class BufferPeer:
    """The replay buffer of one run."""

    def __init__(self, link: Link, target: str, run_id: str, partition: str, timeout_s: float) -> None:
        self._stub: buffer_pb2_grpc.ReplayBufferAsyncStub = buffer_pb2_grpc.ReplayBufferStub(link.control)
        self._parked: buffer_pb2_grpc.ReplayBufferAsyncStub = buffer_pb2_grpc.ReplayBufferStub(link.parked)
        self.target = target
        self._run_id = run_id
        self._partition = partition
        self._timeout_s = timeout_s

    async def state(self) -> BufferState:
        """Epoch and step of the run in the buffer.

        Raises INVALID_ARGUMENT / VALIDATION_PARTITION if the partition is not one to train from: nothing in it is ever
        evicted or refilled.
        """
        answer = await self._call(self._stub.GetRun(buffer_pb2.GetRunRequest(run_id=self._run_id), timeout=self._t))
        kinds = {partition.name: partition.kind for partition in answer.run.config.partitions}
        if kinds.get(self._partition) == buffer_pb2.PARTITION_KIND_VALIDATION:
            message = f"the buffer keeps validation groups in {self._partition!r}; a trainer needs a training partition"
            raise invalid_argument("config.partition", message, value=self._partition, reason="VALIDATION_PARTITION")
        return BufferState(answer.run.epoch, answer.run.current_step)

    async def open_epoch(self, epoch: int) -> None:
        """Fence off earlier trainers."""
        request = buffer_pb2.OpenEpochRequest(run_id=self._run_id, epoch=epoch)
        await self._call(self._stub.OpenEpoch(request, timeout=self._t))

    async def renew_epoch(self, epoch: int) -> None:
        """Extend the sample leases of the epoch."""
        request = buffer_pb2.RenewEpochRequest(run_id=self._run_id, epoch=epoch)
        await self._call(self._stub.RenewEpoch(request, timeout=self._t))

    async def depth(self, step: int) -> Depth:
        """The depth at `step`; a reader's call, which evicts nothing."""
        return depth_of(await self.raw_depth(step))

    async def raw_depth(self, step: int) -> buffer_pb2.Depth:
        """The same as the buffer tells it."""
        request = buffer_pb2.GetSampleableCountRequest(run_id=self._run_id, partition=self._partition, step=step)
        return (await self._call(self._stub.GetSampleableCount(request, timeout=self._t))).depth

    async def cursor_now(self, epoch: int | None, step: int, cursor: int) -> buffer_pb2.WaitDone:
        """What was evicted since `cursor`: a wait for nothing."""
        async with aclosing(self.wait(epoch, step, 0, cursor, 0.0)) as events:
            async for event in events:
                if event.HasField("done"):
                    return event.done
        raise unavailable(UNREACHABLE, f"the buffer at {self.target} ended a wait without its final event")

    async def check_can_wait(self, step: int) -> None:
        """Raise FAILED_PRECONDITION / BUFFER_CANNOT_WAIT unless the buffer tells its depth and waits on it."""
        try:
            await self.depth(step)
            await self.cursor_now(None, step, 0)
        except TurnoutError as error:
            if error.code is not Code.UNIMPLEMENTED:
                raise
            raise failed_precondition(
                "BUFFER_CANNOT_WAIT",
                f"the buffer at {self.target} cannot wait on depth, which switching needs: {error.message}",
                field="buffer_target",
                value=self.target,
            ) from error

    def wait(
        self, epoch: int | None, step: int, target: int, cursor: int, max_wait_s: float
    ) -> AsyncGenerator[buffer_pb2.WaitForSampleableResponse, None]:
        """The events of one wait of at most `max_wait_s` wall seconds. Closing the generator ends the wait."""
        request = buffer_pb2.WaitForSampleableRequest(
            run_id=self._run_id,
            partition=self._partition,
            epoch=epoch,
            step=step,
            target=target,
            cursor=cursor,
            max_wait=duration_of(max_wait_s),
        )
        timeout_s = max_wait_s + self._timeout_s
        return stream_of(lambda: self._parked.WaitForSampleable(request, timeout=timeout_s), UNREACHABLE, self.target)

    async def next_group_event(self) -> int | None:
        """Sequence number of the group event that comes next, None if the buffer does not list groups."""
        request = buffer_pb2.ListGroupsRequest(run_id=self._run_id, partition=self._partition, page_size=1)
        try:
            answer = await self._call(self._stub.ListGroups(request, timeout=self._t))
        except TurnoutError as error:
            if error.code is not Code.UNIMPLEMENTED:
                raise
            return None
        return answer.event_sequence + 1

    def watch_groups(self, start: int | None) -> AsyncGenerator[buffer_pb2.WatchGroupsResponse, None]:
        """Group events from sequence number `start`, or from now on."""
        request = buffer_pb2.WatchGroupsRequest(run_id=self._run_id, from_sequence=start)
        return stream_of(lambda: self._parked.WatchGroups(request), UNREACHABLE, self.target)

    async def checkpoint(self, epoch: int, step: int, checkpoint_id: str, timeout_s: float) -> str:
        """Save the buffer; the checkpoint's id."""
        request = buffer_pb2.CheckpointRequest(run_id=self._run_id, epoch=epoch, step=step, checkpoint_id=checkpoint_id)
        answer = await self._call(self._stub.Checkpoint(request, timeout=timeout_s))
        return answer.checkpoint.checkpoint_id

    async def restore(self, epoch: int, checkpoint_id: str, request_id: str, timeout_s: float) -> int:
        """Roll the buffer back; the eviction cursor to go on with."""
        request = buffer_pb2.RestoreRequest(
            run_id=self._run_id, epoch=epoch, checkpoint_id=checkpoint_id, request_id=request_id
        )
        return (await self._call(self._stub.Restore(request, timeout=timeout_s))).cursor

    @property
    def _t(self) -> float:
        return self._timeout_s

    async def _call(self, call: Awaitable[T]) -> T:
        async with errors_of(UNREACHABLE, self.target):
            return await call
