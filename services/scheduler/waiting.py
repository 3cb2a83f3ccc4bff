"""A trainer's wait with its GPUs lent, until the policy takes them back.

Invariants: the buffer's events are forwarded in order; a refill claim goes to the newest caller alone, since two would
pay it twice; each caller that joins makes the buffer say again what is unpaid. The policy is asked at every arrival and
when it wanted to be, not while a WAIT hold stands (nothing could be trained on). Where no replica serves for long, the
GPUs go back whatever the policy wants: the trainer alone can bring weights to those that came back. The wait ends with
its last caller; what the decision sets in motion does not.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, TypeAlias

from services.runtime.errors import TurnoutError, aborted, unavailable
from services.scheduler.buffer_peer import UNREACHABLE, depth_of
from services.scheduler.domain.run import Depth
from services.scheduler.hosted import HostedRun
from services.scheduler.links import unanswered
from services.scheduler.policies.types import Action, Decision, Point
from services.scheduler.undertaking import Outcome, WaitEnd
from turnout.buffer.v1 import buffer_pb2

Event: TypeAlias = buffer_pb2.WaitProgress | buffer_pb2.RefillDue

REACHED: Final = buffer_pb2.WAIT_OUTCOME_REACHED
EXHAUSTED: Final = buffer_pb2.WAIT_OUTCOME_EXHAUSTED
TIMED_OUT: Final = buffer_pb2.WAIT_OUTCOME_TIMED_OUT
HELD: Final = buffer_pb2.WAIT_OUTCOME_HELD

ABANDONED: Final = "WAIT_ABANDONED"
"""Reason with which a wait that nobody follows any more ends."""

DARK: Final = (
    "no replica serves, so that nothing is generated: the trainer has to bring weights to those that came back"
)
"""Why a wait ends EXHAUSTED whatever could still arrive."""


class Caller:
    """One call that follows the wait. A slow one gets the newest progress, and every refill."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._progress: buffer_pb2.WaitProgress | None = None
        self._refills: dict[str, buffer_pb2.RefillDue] = {}
        self._ended = False
        self._news = asyncio.Event()

    def tell(self, event: Event) -> None:
        """Something happened."""
        if isinstance(event, buffer_pb2.RefillDue):
            # A claim that is shown again, after the wait was taken up anew, is still one claim.
            self._refills[event.refill_claim_id] = event
        else:
            self._progress = event
        self._news.set()

    def end(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._news.set()

    async def next(self) -> Event | None:
        """The next event, None at the end."""
        while True:
            if self._refills:
                return self._refills.pop(next(iter(self._refills)))
            if self._progress is not None:
                progress, self._progress = self._progress, None
                return progress
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()


class Wait:
    """One wait of one run at `step`, for `target` groups, counting evictions from `cursor`."""

    def __init__(self, hosted: HostedRun, step: int, target: int, cursor: int) -> None:
        self._hosted = hosted
        self._step = step
        self._target = target
        self._cursor = cursor
        self._callers: list[Caller] = []
        self._wake = asyncio.Event()
        self._rearm = False
        self._failure: Exception | None = None
        self._depth: Depth | None = None
        self._decision: Decision | None = None
        self._recheck_at: float | None = None
        self._began = math.inf

    # ------------------------------------------------------------------------------------------------- callers

    async def follow(self, budget_s: float, work: asyncio.Task[object]) -> AsyncGenerator[Event, None]:
        """The events for one more caller, who waits at most `budget_s` wall seconds, until `work` ends.

        `work` is the task that runs this wait and what comes after it.
        """
        clock = self._hosted.tools.clock
        caller = Caller(clock.now() + budget_s / clock.scale)
        again = bool(self._callers)
        self._callers.append(caller)
        if again:
            self._rearm = True
            self._wake.set()

        def ended(_: object) -> None:
            caller.end()

        work.add_done_callback(ended)
        try:
            while (event := await caller.next()) is not None:
                yield event
        finally:
            work.remove_done_callback(ended)
            newest = self._callers[-1] is caller
            self._callers.remove(caller)
            self._rearm = self._rearm or newest
            self._wake.set()

    def stop(self, error: Exception) -> None:
        """End the wait with `error`, unless its decision was taken."""
        self._failure = error
        self._wake.set()

    def wake(self) -> None:
        """Look again at what else than the buffer it depends on."""
        self._wake.set()

    # ------------------------------------------------------------------------------------------------ the wait

    async def run(self) -> WaitEnd:
        """Wait. Raises what `stop` was given, or UNAVAILABLE if the buffer cannot be reached for long."""
        self._began = self._hosted.tools.clock.now()
        outcome, done, reason = await self._until_end()
        waited_s = self._hosted.tools.clock.now() - self._began
        return WaitEnd(outcome, done, self._decision, reason, waited_s)

    async def _until_end(self) -> tuple[Outcome, buffer_pb2.WaitDone, str]:
        settings = self._hosted.tools.settings
        failures = 0
        while True:
            heard = self._depth
            try:
                end = await self._once()
            except TurnoutError as error:
                failures = failures + 1 if self._depth is heard else 1
                if not unanswered(error) or failures >= settings.peer_attempts:
                    raise
                await self._hosted.tools.draining.race(asyncio.sleep(settings.peer_backoff_s * 2 ** (failures - 1)))
                continue
            if end is not None:
                return end

    async def _once(self) -> tuple[Outcome, buffer_pb2.WaitDone, str] | None:
        """One wait at the buffer; None if it is to be taken up again for a new caller."""
        tools, run = self._hosted.tools, self._hosted.run
        self._rearm = False
        dark = False
        remaining_s = max(0.0, self._deadline - tools.clock.now()) * tools.clock.scale
        stream = self._hosted.buffer.wait(run.epoch, self._step, self._target, self._cursor, remaining_s)
        async with aclosing(stream):
            upcoming = asyncio.ensure_future(anext(stream, None))
            try:
                while True:
                    await self._next(upcoming)
                    if self._failure is not None:
                        raise self._failure
                    if self._rearm:
                        return None
                    if not upcoming.done():
                        dark = self._dark
                        if dark or await self._asked_back():
                            break
                        continue
                    event = upcoming.result()
                    if event is None:
                        raise unavailable(UNREACHABLE, "the buffer ended a wait without its final event")
                    if event.HasField("done"):
                        return self._final(event.done)
                    upcoming = asyncio.ensure_future(anext(stream, None))
                    if await self._heard(event):
                        break
            finally:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
        done = await self._hosted.buffer.cursor_now(run.epoch, self._step, self._cursor)
        # Not what it is now: replicas may have come back since.
        return (EXHAUSTED, done, DARK) if dark else self._decided(done)

    @property
    def _dark_at(self) -> float | None:
        """When it will have been dark for too long within this wait, domain seconds."""
        tools, since = self._hosted.tools, self._hosted.dark_since
        if since is None:
            return None
        # Before it nothing was lent; that the hybrids serve now may not have been told yet.
        return max(since, self._began) + tools.settings.dark_after_s / tools.clock.scale

    @property
    def _dark(self) -> bool:
        """Whether nobody generates, and nobody will."""
        at = self._dark_at
        return at is not None and self._hosted.tools.clock.now() >= at

    @property
    def _deadline(self) -> float:
        return self._callers[-1].deadline if self._callers else self._hosted.tools.clock.now()

    async def _next(self, upcoming: asyncio.Future[buffer_pb2.WaitForSampleableResponse | None]) -> None:
        """Until the buffer speaks, the policy wants to be asked, a caller comes or goes, or the service drains."""
        tools = self._hosted.tools
        times = [at for at in (self._recheck_at, self._dark_at) if at is not None]
        timers = [tools.clock.call_at(at, self._wake.set) for at in times]
        woken = asyncio.ensure_future(self._wake.wait())
        drained = asyncio.ensure_future(tools.draining.wait())
        try:
            await asyncio.wait((upcoming, woken, drained), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for timer in timers:
                timer.cancel()
            for waiter in (woken, drained):
                waiter.cancel()
            await asyncio.gather(woken, drained, return_exceptions=True)
        self._wake.clear()
        if not upcoming.done():
            tools.draining.check()
        if not self._callers and self._failure is None:
            raise aborted(ABANDONED, "nobody waits any more; the call may be repeated")

    # ------------------------------------------------------------------------------------------------- events

    async def _heard(self, event: buffer_pb2.WaitForSampleableResponse) -> bool:
        """Forward an event; whether the policy wants the GPUs back."""
        if event.HasField("refill_due"):
            self._callers[-1].tell(event.refill_due)
            return False
        if not event.HasField("progress"):
            return False
        for caller in self._callers:
            caller.tell(event.progress)
        self._observe(event.progress.depth)
        return await self._ask()

    async def _asked_back(self) -> bool:
        """Whether the policy, asked again at the time it named, wants the GPUs back."""
        if self._recheck_at is None or self._hosted.tools.clock.now() < self._recheck_at:
            return False
        # Once only: while a hold stands the policy is not asked, and names no later time.
        self._recheck_at = None
        return await self._ask()

    def _observe(self, depth: buffer_pb2.Depth) -> None:
        reading = depth_of(depth)
        self._depth = Depth(self._step, reading.sampleable, reading.in_flight, reading.unpaid_credits, reading.held)
        self._hosted.run.observe_depth(self._depth, self._hosted.moment)

    async def _ask(self) -> bool:
        # At the target the buffer's final event is on its way, with the evictions in it.
        if self._depth is None or self._depth.held or self._depth.sampleable >= self._target:
            return False
        await self._hosted.read_progress(Point.WAITING)
        self._decide()
        return self._decision is not None and self._decision.action is Action.RECLAIM

    def _decide(self) -> None:
        moment = self._hosted.moment
        self._decision = self._hosted.run.decide(Point.WAITING, self._step, moment)
        wanted = self._decision.recheck_at
        ahead = None if wanted is None else wanted - self._hosted.run.at(moment.now)
        # A time that is past would be asked for without end.
        self._recheck_at = None if ahead is None or ahead <= 0 else moment.now + ahead

    def _final(self, done: buffer_pb2.WaitDone) -> tuple[Outcome, buffer_pb2.WaitDone, str]:
        self._observe(done.depth)
        if done.outcome in (REACHED, EXHAUSTED):
            self._decide()
        return done.outcome, done, done.reason

    def _decided(self, done: buffer_pb2.WaitDone) -> tuple[Outcome, buffer_pb2.WaitDone, str]:
        depth, decision = self._depth, self._decision
        assert depth is not None
        assert decision is not None
        if decision.threshold is not None and depth.reachable < decision.threshold:
            return EXHAUSTED, done, decision.reason
        return REACHED, done, ""
