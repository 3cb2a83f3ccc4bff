"""Results and failures on their way to the buffer.

Invariants: what is ready at the same time goes in one call; what was not answered is sent again, unchanged, until it
is; each item gets its own outcome; a batch that is refused as a whole is tried one by one, so one bad item harms no
other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from turnout import tracing
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, DeadlineExceeded, TurnoutError, Unavailable, item_error, new_request_id

T = TypeVar("T", buffer_pb2.TrajectoryResult, buffer_pb2.TrajectoryFailure)
Send = Callable[[Sequence[Any], str], Awaitable[Sequence[buffer_pb2.ItemOutcome]]]

_MAX_ITEMS: Final = 512
_MAX_BYTES: Final = 8 * 1024 * 1024
"""A batch stays far below the services' message limit, and small enough to be sent again cheaply."""

_PAUSE_S: Final = 1.0
"""Between tries while the buffer is away; each try has its own retries inside."""

_PASSING: Final = frozenset({"DISK_FULL", "CAP_REQUEST_RATE", "CAP_PARKED_WAITS"})
"""Refusals that end by themselves or by an operator's hand. What was generated is worth more than the wait."""


@dataclass(slots=True)
class _Entry(Generic[T]):
    item: T
    trace: Any
    outcome: asyncio.Future[TurnoutError | None]


def is_passing(error: TurnoutError) -> bool:
    """Whether the buffer will take the same call later: it is away, its disk is full, or too much was asked of it."""
    return isinstance(error, Unavailable | DeadlineExceeded) or error.reason in _PASSING


class _Queue(Generic[T]):
    """Sends items of one kind; `run` is its loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._entries: deque[_Entry[T]] = deque()
        self._wake = asyncio.Event()

    async def put(self, item: T) -> TurnoutError | None:
        """Send an item, together with others; return what the buffer said of it."""
        entry = _Entry(item, tracing.current(), asyncio.get_running_loop().create_future())
        self._entries.append(entry)
        self._wake.set()
        return await entry.outcome

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._entries:
                await self._deliver(self._take())

    def _take(self) -> list[_Entry[T]]:
        batch: list[_Entry[T]] = []
        size = 0
        while self._entries and len(batch) < _MAX_ITEMS:
            size += self._entries[0].item.ByteSize()
            if batch and size > _MAX_BYTES:
                break
            batch.append(self._entries.popleft())
        # The caller may have been cancelled while it waited.
        return [entry for entry in batch if not entry.outcome.done()]

    async def _deliver(self, batch: list[_Entry[T]]) -> None:
        if not batch:
            return
        request_id = new_request_id()
        while True:
            try:
                with tracing.together("settle", [entry.trace for entry in batch]):
                    outcomes = await self._send([entry.item for entry in batch], request_id)
                break
            except TurnoutError as error:
                if is_passing(error):
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if len(batch) == 1:
                    _settle(batch[0], error)
                else:
                    for entry in batch:
                        await self._deliver([entry])
                return
        for entry, outcome in zip(batch, outcomes, strict=True):
            _settle(entry, item_error(outcome))


def _settle(entry: _Entry[Any], error: TurnoutError | None) -> None:
    if not entry.outcome.done():
        entry.outcome.set_result(error)


class Outbox:
    """Delivers results and failures of one run and partition."""

    def __init__(self, buffer: AsyncBufferClient, *, run_id: str, partition: str) -> None:
        self._buffer = buffer
        self._run_id = run_id
        self._partition = partition
        self._results: _Queue[buffer_pb2.TrajectoryResult] = _Queue(self._finish)
        self._failures: _Queue[buffer_pb2.TrajectoryFailure] = _Queue(self.send_failures)

    async def finish(self, result: buffer_pb2.TrajectoryResult) -> TurnoutError | None:
        """Settle a trajectory with its result. None: settled."""
        return await self._results.put(result)

    async def fail(self, failure: buffer_pb2.TrajectoryFailure) -> TurnoutError | None:
        """Report a failed attempt. None: taken."""
        return await self._failures.put(failure)

    async def run(self) -> None:
        """Deliver until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._results.run())
            tasks.create_task(self._failures.run())

    async def send_failures(
        self, failures: Sequence[buffer_pb2.TrajectoryFailure], request_id: str
    ) -> Sequence[buffer_pb2.ItemOutcome]:
        """Report failures in one call, at once."""
        request = buffer_pb2.FailTrajectoriesRequest(
            run_id=self._run_id, partition=self._partition, failures=failures, request_id=request_id
        )
        return (await self._buffer.calls.FailTrajectories(request)).outcomes

    async def _finish(
        self, results: Sequence[buffer_pb2.TrajectoryResult], request_id: str
    ) -> Sequence[buffer_pb2.ItemOutcome]:
        request = buffer_pb2.FinishTrajectoriesRequest(
            run_id=self._run_id, partition=self._partition, results=results, request_id=request_id
        )
        return (await self._buffer.calls.FinishTrajectories(request)).outcomes
