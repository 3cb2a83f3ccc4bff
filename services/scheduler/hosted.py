"""One run with everything it needs to act: its state, its peers and the clock.

Invariant: this holds the parts together and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from services.runtime.clock import Clock
from services.runtime.draining import Draining
from services.runtime.errors import TurnoutError, failed_precondition
from services.scheduler.buffer_peer import BufferPeer
from services.scheduler.convert import run_to_proto
from services.scheduler.domain.calls import CallKey, Ending
from services.scheduler.domain.events import TopologyChanged
from services.scheduler.domain.holdings import Holdings
from services.scheduler.domain.run import Moment, Run
from services.scheduler.engine_peer import EnginePeer
from services.scheduler.joins import Joins
from services.scheduler.policies.types import Point
from services.scheduler.settings import SchedulerSettings
from services.scheduler.undertaking import Undertaking
from turnout.scheduler.v1 import scheduler_pb2


class Keeping(Protocol):
    """Who keeps what becomes of runs."""

    def follow(self, hosted: HostedRun) -> None:
        """Keep this run from now on, in place of the one of its id that was kept before."""
        ...

    async def durable(self, hosted: HostedRun) -> None:
        """Return once everything that became of the run so far is durable. Raises why it is not."""
        ...

    def forget(self, run_id: str) -> None:
        """A closed run is kept no longer."""
        ...


class Memory:
    """Keeps nothing: runs last as long as the process."""

    def follow(self, hosted: HostedRun) -> None:
        """Nothing to do."""

    async def durable(self, hosted: HostedRun) -> None:
        """Nothing to wait for."""

    def forget(self, run_id: str) -> None:
        """Nothing to do."""


@dataclass(slots=True)
class Tools:
    """What all runs share. `new_id` makes ids of lends and checkpoints, `keeping` keeps runs over restarts."""

    clock: Clock
    draining: Draining
    settings: SchedulerSettings
    holdings: Holdings
    new_id: Callable[[], str]
    keeping: Keeping = field(default_factory=Memory)

    def moment(self) -> Moment:
        """Now."""
        return Moment(self.clock.now(), self.clock.wall())


@dataclass(frozen=True, slots=True)
class Answered:
    """What a call answers, and how that moves the order of calls on."""

    answer: object
    ending: Ending = Ending.DONE
    lend_id: str = ""


async def _nothing() -> None:
    return None


async def _reads_nothing(_: Point) -> None:
    return None


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """One call of a trainer: what it said, and what it sets in motion. `work` may be begun again where it stopped."""

    key: CallKey
    content: bytes
    request: bytes
    work: Callable[[Undertaking], Awaitable[Answered]]


@dataclass(slots=True)
class Following:
    """How far the peers were followed.

    next_group_event: the buffer's event that comes next, None: whatever comes. last_replica: that of the trajectory
    that finished last, which completed the group whose end comes next.
    """

    next_group_event: int | None = None
    last_replica: str = ""
    topology: TopologyChanged | None = None


@dataclass(slots=True)
class HostedRun:
    """A run that this service hosts. `opening`: the OpenRun that asked for it."""

    tools: Tools
    run: Run
    buffer: BufferPeer
    engine: EnginePeer
    opening: bytes
    answered: bytes = b""
    """What that OpenRun was answered; empty before."""
    following: Following = field(default_factory=Following)
    undertaking: Undertaking | None = None
    """The call that is being worked on, or that failed with something left that its repeat goes on from."""
    joins: Joins = field(default_factory=Joins)
    stop_waits: Callable[[Exception], None] = lambda _: None
    """Ends the waits of the present epoch with an error."""
    wake_waits: Callable[[], None] = lambda: None
    """Has the waits of the present epoch look again at `dark_since`."""
    dark_since: float | None = None
    """When the last replica that served ceased to, domain seconds; None while one serves or nobody knows."""
    stop_following: Callable[[], Awaitable[None]] = _nothing
    """Ends the streams that are followed for the present epoch."""
    read_progress: Callable[[Point], Awaitable[None]] = _reads_nothing
    """Looks at what runs before the policy is asked at a point, if that would change its answer."""
    fenced: TurnoutError | None = None
    """Why calls of this epoch are refused already: a successor is being let in, or the run is being closed."""

    @property
    def moment(self) -> Moment:
        """Now."""
        return self.tools.moment()

    def shown(self) -> scheduler_pb2.Run:
        """The run as the contract shows it."""
        clock = self.tools.clock
        return run_to_proto(self.run, clock.now(), clock.scale, self.buffer.target, self.engine.target)

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

    async def durable(self) -> None:
        """Return once everything that became of the run so far is durable: nothing may be told, or ordered, before."""
        await self.tools.keeping.durable(self)

    async def call(self, call: TrainerCall) -> object:
        """Answer a trainer's call: with the stored answer, with that of the same call under way, or by its work.

        The work runs in a task of the run and only if the call may come now. Its failure changes nothing in the order.
        """
        stored = self.run.order.answer(call.key, call.content)
        if stored is not None:
            await self.durable()
            return stored
        with self.parked():
            return await self.result(self.begin(call))

    async def result(self, task: asyncio.Task[object]) -> object:
        """What a task of the run ends with; the caller may go without ending it."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise (self.fenced or self.closed()) from None
            raise

    def closed(self) -> TurnoutError:
        """The error of whatever a closed run is asked for."""
        message = f"the run {self.run.run_id!r} is closed"
        return failed_precondition("RUN_CLOSED", message, run_id=self.run.run_id)

    def begin(self, call: TrainerCall) -> asyncio.Task[object]:
        """The task in which the run answers `call`, begun now unless it is under way.

        Raises FAILED_PRECONDITION / OUT_OF_ORDER at once if the call is not among the expected ones.
        """
        if self.fenced is not None:
            raise self.fenced
        if call.key not in self.joins:
            # Not only in its turn: a call that may not come must not wait, perhaps for hours, to hear so.
            self.run.order.check(call.key)
        return self.joins.start(call.key, call.content, lambda: self._in_order(call))

    async def _in_order(self, call: TrainerCall) -> object:
        order = self.run.order
        # The one before may have been the same call, or have moved on.
        answer = order.answer(call.key, call.content)
        if answer is None:
            order.check(call.key)
            answered = await self._undertake(call)
            answer = answered.answer
            order.done(call.key, call.content, answer, answered.ending, answered.lend_id)
            self.undertaking = None
        await self.durable()
        return answer

    async def _undertake(self, call: TrainerCall) -> Answered:
        undertaking = self.undertaking
        if undertaking is None or not undertaking.is_of(call.key, call.content):
            undertaking = self.undertaking = Undertaking(call.key, call.content, call.request)
        try:
            return await call.work(undertaking)
        except Exception:
            if undertaking.wait_end is None:
                self.undertaking = None
            raise

    @contextmanager
    def parked(self) -> Iterator[None]:
        """A call of the trainer is under way: its lease does not run out."""
        lease = self.run.lease
        lease.park()
        try:
            yield
        finally:
            lease.unpark(self.tools.clock.now())
