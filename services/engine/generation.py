"""Places requests, forwards them, and continues them elsewhere when a replica goes away.

Invariants: a request is forwarded only to a replica that serves; what came out of an engine is never lost or made
twice; a request id is live once, from the moment it is accepted until its last event is ready; ending a request asks
its engine first, so that its tokens are kept. Times are domain seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from services.engine.backends.base import EngineOutput, EngineRequest, engine_dead
from services.engine.domain.placement import Ticket
from services.engine.domain.requests import Finish, Generation, Piece
from services.engine.domain.spec import Health, Role, Route
from services.engine.fleet import Fleet
from services.engine.slot import Slot
from services.runtime.clock import Clock
from services.runtime.draining import Draining, draining_error
from services.runtime.errors import Code, TurnoutError, already_exists, failed_precondition, unavailable
from services.runtime.logs import get_logger

NO_REPLICA_S: Final = 30.0
"""How long a request waits while there is no replica at all: longer than a restart of an agent."""

FRUITLESS_ATTEMPTS: Final = 8
"""Engines that may fail one request in a row before its caller is told: more is not bad luck."""

CALLER_FAULTS: Final = frozenset({Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE, Code.PERMISSION_DENIED})
"""What another replica would answer as well."""

_LOG = get_logger("engine")


@dataclass(frozen=True, slots=True)
class PlacedEvent:
    """Where the request is now; parked if it waits for a held replica."""

    replica_id: str
    parked: bool


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end: output of the last segment that no delta carried. The segments are those of the generation."""

    finish: Finish
    rest: Piece | None


Event = PlacedEvent | Piece | DoneEvent


class Grown:
    """A step inside: the output has grown."""


GROWN: Final = Grown()
Step = PlacedEvent | Grown | Finish


class Live:
    """A live request; what `Slot` knows as a forward while an engine has it."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.slot: Slot | None = None
        self.ticket: Ticket | None = None
        self.engine_id = ""
        self.aborted = False
        self.moving = False
        self.stopped: TurnoutError | None = None
        self.ended = asyncio.Event()
        self._woken = asyncio.Event()

    @property
    def prompt_tokens(self) -> int:
        return len(self.generation.prompt)

    @property
    def output_tokens(self) -> int:
        return len(self.generation.output)

    def interrupt(self) -> None:
        """Wake it where it waits; it looks at its state and decides."""
        self._woken.set()

    async def woken(self) -> None:
        """Wait for an interruption."""
        await self._woken.wait()

    def heed(self) -> None:
        """The interruption was seen."""
        self._woken.clear()


class Generations:
    """All live requests of the controller."""

    def __init__(self, fleet: Fleet, clock: Clock, draining: Draining, prefix: str, abort_timeout: float) -> None:
        self._fleet = fleet
        self._clock = clock
        self._draining = draining
        self._prefix = prefix
        self._abort_timeout = abort_timeout
        self._next = 1
        self._live: dict[str, Live] = {}

    @property
    def live(self) -> Iterable[Live]:
        """The live requests."""
        return self._live.values()

    async def run(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Generate one output; the last event is a DoneEvent."""
        generation.validate()
        self._draining.check()
        if generation.request_id in self._live:
            raise already_exists(
                "REQUEST_LIVE", f"request {generation.request_id!r} is live", request_id=generation.request_id
            )
        live = self._live[generation.request_id] = Live(generation)
        try:
            finish = generation.complete
            steps = self._pinned(live) if generation.pinned_to else self._roam(live)
            async with aclosing(steps):
                while finish is None:
                    step = await anext(steps)
                    if isinstance(step, Finish):
                        finish = step
                    elif isinstance(step, PlacedEvent):
                        yield step
                    elif generation.delta_tokens:
                        for piece in generation.take():
                            yield piece
            pieces = generation.take()
            for piece in pieces[:-1]:
                yield piece
        finally:
            # Before the last event leaves: whoever has seen it may use the id again.
            del self._live[generation.request_id]
            live.ended.set()
        yield DoneEvent(finish, pieces[-1] if pieces else None)

    async def abort(self, request_ids: Iterable[str] | None, slots: Sequence[Slot] | None) -> int:
        """End live requests; None is all of them, and None for the slots is wherever they are. Returns how many."""
        chosen = [self._live[key] for key in (self._live if request_ids is None else request_ids) if key in self._live]
        if slots is not None:
            ids = {slot.replica_id for slot in slots}
            chosen = [live for live in chosen if live.slot is not None and live.slot.replica_id in ids]
        by_slot: dict[Slot, list[str]] = {}
        for live in chosen:
            live.aborted = True
            if live.slot is not None and live.engine_id:
                by_slot.setdefault(live.slot, []).append(live.engine_id)
            else:
                live.interrupt()
        if request_ids is None:
            # Engines may run requests that did not come through here.
            everywhere = self._fleet.all if slots is None else slots
            aborts = [self._abort_on(slot, None) for slot in everywhere]
        else:
            aborts = [self._abort_on(slot, engine_ids) for slot, engine_ids in by_slot.items()]
        await asyncio.gather(*aborts, self._all_ended(chosen))
        return len(chosen)

    async def move(self) -> None:
        """Let requests that run on a standalone replica and are wanted on hybrids go on there, if one serves."""
        hybrids = self._fleet.select(roles=[Role.HYBRID])
        if not any(slot.serves() for slot in hybrids):
            return
        by_slot: dict[Slot, list[str]] = {}
        for live in self._live.values():
            slot = live.slot
            if slot is None or not live.engine_id or live.generation.pinned_to or live.aborted:
                continue
            wanted = self._fleet.wishes.role(live.generation.join_key)
            if wanted is Role.HYBRID and slot.replica.spec.role is Role.STANDALONE:
                live.moving = True
                by_slot.setdefault(slot, []).append(live.engine_id)
        await asyncio.gather(*(self._abort_on(slot, engine_ids) for slot, engine_ids in by_slot.items()))

    def stop(self) -> None:
        """The service stops: every request ends with UNAVAILABLE / DRAINING."""
        for live in list(self._live.values()):
            live.stopped = draining_error()
            live.interrupt()

    async def _abort_on(self, slot: Slot, engine_ids: list[str] | None) -> None:
        try:
            async with asyncio.timeout(self._abort_timeout):
                await slot.backend.abort(engine_ids)
        except (TurnoutError, TimeoutError):
            slot.suspect()

    async def _all_ended(self, chosen: list[Live]) -> None:
        waits = [asyncio.ensure_future(live.ended.wait()) for live in chosen]
        if not waits:
            return
        _, pending = await asyncio.wait(waits, timeout=self._abort_timeout)
        for wait in pending:
            wait.cancel()
        for live in chosen:
            # An engine that does not end it loses it: the tokens that came are kept.
            live.interrupt()

    # ----------------------------------------------------------------------------------------------------------- steps

    async def _roam(self, live: Live) -> AsyncGenerator[Step, None]:
        """Place the request, again and again, until it is finished."""
        fruitless = before = 0
        while True:
            live.ticket = ticket = await self._place(live)
            slot = live.slot = None if ticket is None else self._fleet.get(ticket.replica_id)
            try:
                if slot is None:
                    yield Finish.ABORT
                    return
                if not slot.serves():
                    yield PlacedEvent(slot.replica_id, True)
                    if not await self._wait_until_serving(live, slot):
                        continue
                yield PlacedEvent(slot.replica_id, False)
                if not slot.serves():
                    # The route changed while the event was on its way.
                    continue
                before = len(live.generation.output)
                async with aclosing(self._forward(live, slot)) as steps:
                    async for step in steps:
                        yield step
                        if isinstance(step, Finish):
                            return
                if slot.serves() and len(live.generation.output) == before and not live.moving:
                    raise unavailable("ENGINE_ABORTED", f"{slot.replica_id} ended a request that nobody aborted")
            except TurnoutError as error:
                fruitless = 0 if len(live.generation.output) > before else fruitless + 1
                if error.code in CALLER_FAULTS or live.stopped or fruitless >= FRUITLESS_ATTEMPTS:
                    raise
                assert slot is not None
                _LOG.info("request goes on elsewhere", replica_id=slot.replica_id, reason=error.reason)
                slot.suspect()
            finally:
                live.slot = None
                live.moving = False
                if ticket is not None:
                    self._fleet.placement.release(ticket)

    async def _pinned(self, live: Live) -> AsyncGenerator[Step, None]:
        """Run the request on the replica it names, whatever its route, or not at all."""
        slot = live.slot = self._fleet.get(live.generation.pinned_to)
        if slot.replica.health is Health.DEAD:
            raise engine_dead(f"the engine of {slot.replica_id} is dead")
        blocker = slot.replica.blocker()
        if blocker not in ("", "PAUSED"):
            raise failed_precondition(
                blocker, f"{slot.replica_id}: {slot.replica.why_not_serving}", replica_id=slot.replica_id
            )
        try:
            async with aclosing(self._forward(live, slot)) as steps:
                async for step in steps:
                    yield step
            yield Finish.ABORT
        except TurnoutError as error:
            if error.code not in CALLER_FAULTS:
                slot.suspect()
            raise

    async def _place(self, live: Live) -> Ticket | None:
        """A place for the request, as soon as there is one; None if it was aborted meanwhile."""
        gives_up = self._clock.now() + NO_REPLICA_S
        while True:
            if live.stopped:
                raise live.stopped
            if live.aborted:
                return None
            seen = self._fleet.routes.version
            ticket = self._fleet.placement.place(
                self._fleet.usable_for(live.generation.join_key), live.generation.session_id
            )
            if ticket is not None:
                return ticket
            if self._clock.now() >= gives_up:
                raise unavailable("NO_REPLICA", f"no replica took requests for {NO_REPLICA_S:g} s")
            await self._wait_for_routes(live, seen, gives_up)

    async def _wait_until_serving(self, live: Live, slot: Slot) -> bool:
        """Park until the replica serves (True), or the request has to go elsewhere (False)."""
        while True:
            if live.stopped:
                raise live.stopped
            if live.aborted or not self._fleet.holds(slot) or slot.replica.route is Route.OUT:
                return False
            if slot.replica.route is Route.SERVING:
                return True
            await self._wait_for_routes(live, self._fleet.routes.version, None)

    async def _wait_for_routes(self, live: Live, seen: int, until: float | None) -> None:
        waits = [asyncio.ensure_future(self._fleet.routes.beyond(seen)), asyncio.ensure_future(live.woken())]
        timer = None if until is None else self._clock.call_at(until, live.interrupt)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if timer is not None:
                timer.cancel()
            for wait in waits:
                wait.cancel()
            live.heed()

    async def _forward(self, live: Live, slot: Slot) -> AsyncGenerator[Step, None]:
        """Have an engine go on with the request until it ends there. A Finish is the last step if it is finished."""
        generation = live.generation
        live.engine_id = generation.request_id if generation.pinned_to else f"{self._prefix}-r{self._next}"
        self._next += 1
        slot.kept_tokens = slot.kept_tokens or 0
        slot.forwards.enter(live)
        outputs = slot.backend.generate(self._request(live))
        try:
            finish = Finish.ABORT
            while (output := await self._next_output(live, slot, outputs)) is not None:
                version = output.weight_version
                if version is None:
                    version = slot.replica.weight_version
                generation.append(slot.replica_id, version, output.token_ids, output.logprobs)
                slot.kept_tokens += len(output.token_ids)
                if output.finish is not None:
                    finish = output.finish
                    break
                yield GROWN
            if finish is not Finish.ABORT or live.aborted:
                yield finish
        except TurnoutError:
            if not live.aborted:
                raise
            yield Finish.ABORT
        finally:
            generation.leave()
            live.engine_id = ""
            slot.forwards.leave(live)
            await _close(outputs)

    async def _next_output(self, live: Live, slot: Slot, outputs: AsyncIterator[EngineOutput]) -> EngineOutput | None:
        """What the engine gives next; None if the request has to leave it without waiting for more."""
        reading = asyncio.ensure_future(anext(outputs, None))
        woken = asyncio.ensure_future(live.woken())
        try:
            while True:
                await asyncio.wait({reading, woken}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    output = reading.result()
                    if output is None:
                        raise unavailable("ENGINE_ENDED_STREAM", f"{slot.replica_id} ended a request without a reason")
                    return output
                live.heed()
                if live.stopped:
                    raise live.stopped
                if live.aborted or not self._fleet.holds(slot) or slot.replica.health is not Health.HEALTHY:
                    return None
                woken = asyncio.ensure_future(live.woken())
        finally:
            for wait in (reading, woken):
                wait.cancel()
            await asyncio.gather(reading, woken, return_exceptions=True)

    @staticmethod
    def _request(live: Live) -> EngineRequest:
        generation = live.generation
        return EngineRequest(
            live.engine_id,
            generation.prompt,
            generation.output.snapshot(),
            generation.max_tokens,
            generation.sampling,
            generation.join_key,
            generation.delta_tokens,
            generation.delta_interval,
        )


async def _close(outputs: AsyncIterator[EngineOutput]) -> None:
    if isinstance(outputs, AsyncGenerator):
        await outputs.aclose()
