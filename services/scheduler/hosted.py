"""One run with everything it needs to act: its state, its peers and the clock.

Invariant: this holds the parts together and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.runtime.clock import Clock
from services.runtime.draining import Draining
from services.runtime.errors import TurnoutError, failed_precondition
from services.scheduler.buffer_peer import BufferPeer
from services.scheduler.domain.calls import CallKey, Ending
from services.scheduler.domain.holdings import Holdings
from services.scheduler.domain.run import Moment, Run
from services.scheduler.engine_peer import EnginePeer
from services.scheduler.joins import Joins
from services.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class Tools:
    """What all runs share. `new_id` makes ids of lends and checkpoints."""

    clock: Clock
    draining: Draining
    settings: SchedulerSettings
    holdings: Holdings
    new_id: Callable[[], str]

    def moment(self) -> Moment:
        """Now."""
        return Moment(self.clock.now(), self.clock.wall())


@dataclass(frozen=True, slots=True)
class Answered:
    """What a call answers, and how that moves the order of calls on."""

    answer: object
    ending: Ending = Ending.DONE
    lend_id: str = ""


@dataclass(slots=True)
class HostedRun:
    """A run that this service hosts."""

    tools: Tools
    run: Run
    buffer: BufferPeer
    engine: EnginePeer
    joins: Joins = field(default_factory=Joins)
    stop_waits: Callable[[Exception], None] = lambda _: None
    """Ends the waits of the present epoch with an error."""
    fenced: TurnoutError | None = None
    """Why calls of this epoch are refused already: a successor is being let in, or the run is being closed."""

    @property
    def moment(self) -> Moment:
        """Now."""
        return self.tools.moment()

    def fence(self, error: TurnoutError) -> None:
        """Let in no further call of this epoch, and end its waits."""
        self.fenced = error
        self.stop_waits(error)

    def admit(self, epoch: int) -> None:
        """A trainer's call arrived: refuse it, or take it as a sign of life."""
        self.run.check_epoch(epoch)
        if self.fenced is not None:
            raise self.fenced
        if not self.run.is_open:
            raise self.closed()
        self.run.lease.renew(self.tools.clock.now())

    async def call(self, key: CallKey, content: bytes, work: Callable[[], Awaitable[Answered]]) -> object:
        """Answer a trainer's call: with the stored answer, with that of the same call under way, or by `work`.

        `work` runs in a task of the run and only if the call may come now. Its failure changes nothing in the order.
        """
        stored = self.run.order.answer(key, content)
        if stored is not None:
            return stored
        with self.parked():
            return await self.result(self.begin(key, content, work))

    async def result(self, task: asyncio.Task[object]) -> object:
        """What a task of the run ends with; the caller may go without ending it."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise self.closed() from None
            raise

    def closed(self) -> TurnoutError:
        """The error of whatever a closed run is asked for."""
        message = f"the run {self.run.run_id!r} is closed"
        return failed_precondition("RUN_CLOSED", message, run_id=self.run.run_id)

    def begin(self, key: CallKey, content: bytes, work: Callable[[], Awaitable[Answered]]) -> asyncio.Task[object]:
        """The task in which the run answers `key`, begun now unless it is under way.

        Raises FAILED_PRECONDITION / OUT_OF_ORDER at once if `key` is not among the expected calls.
        """
        if self.fenced is not None:
            raise self.fenced
        order = self.run.order
        if key not in self.joins:
            # Not only in its turn: a call that may not come must not wait, perhaps for hours, to hear so.
            order.check(key)

        async def in_order() -> object:
            # The one before may have been the same call, or have moved on.
            stored = order.answer(key, content)
            if stored is not None:
                return stored
            order.check(key)
            answered = await work()
            order.done(key, content, answered.answer, answered.ending, answered.lend_id)
            return answered.answer

        return self.joins.start(key, content, in_order)

    @contextmanager
    def parked(self) -> Iterator[None]:
        """A call of the trainer is under way: its lease does not run out."""
        lease = self.run.lease
        lease.park()
        try:
            yield
        finally:
            lease.unpark(self.tools.clock.now())
