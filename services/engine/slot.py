"""One replica in the controller: its state machine, its engine, and the queue between them.

Invariants: commands reach the engine one after the other, in the order in which they came; one that is overdue still
counts as under way, so nothing overtakes it, since an engine may carry it out later; reads never queue. After a
failed command the engine is probed before anything is planned again. Timeouts are wall seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from services.engine.backends.base import Answer, Backend, Shards
from services.engine.deadline import Deadline
from services.engine.domain.calls import (
    Call,
    Drain,
    Pause,
    Plan,
    ReleaseKv,
    ResetCaches,
    Resume,
    ResumeKv,
    Sleep,
    WakeUp,
)
from services.engine.domain.engine_state import EngineState
from services.engine.domain.replica import Replica
from services.engine.domain.spec import Health, Route
from services.engine.forwards import Forwards
from services.engine.tally import Tally
from services.runtime.errors import Code, TurnoutError, aborted, deadline_exceeded, internal, unavailable
from services.runtime.logs import get_logger

T = TypeVar("T")

DRAIN_TURN_S: Final = 0.25
"""How long a drain waits before it ends requests (again): some may still be on their way to the engine."""

WATCH_S: Final = 0.4
"""Between two looks at an engine that has not answered a command yet, so that its death is known within a second."""

_LOG = get_logger("engine")


class Slot:
    """A replica and what the controller needs around it.

    `changed` is called after every change of its state; `durable` is awaited before its engine is told anything.
    """

    def __init__(
        self,
        replica: Replica,
        backend: Backend,
        probe_timeout: float,
        changed: Callable[[Slot], None],
        durable: Callable[[], Awaitable[None]],
    ) -> None:
        self.replica = replica
        self.backend = backend
        self.forwards = Forwards()
        self.probe_wanted = asyncio.Event()
        self.shards: Shards = ()
        self.revision = 0
        """Rises with every change of its state."""
        self.tally = Tally()
        self.kept_tokens: int | None = None
        """Output tokens of its engine that have come to their requests; None while none ran here."""
        self._probe_timeout = probe_timeout
        self._changed = changed
        self._durable = durable
        self._lock = asyncio.Lock()
        self._overdue: asyncio.Task[Any] | None = None
        self._unreached = False

    @property
    def replica_id(self) -> str:
        return self.replica.replica_id

    def serves(self) -> bool:
        """Whether requests may be forwarded now."""
        return self.replica.route is Route.SERVING

    def changed(self) -> None:
        """Tell that the state may have changed."""
        self.revision += 1
        self._changed(self)

    # -------------------------------------------------------------------------------------------------------- commands

    @asynccontextmanager
    async def exclusive(self, deadline: Deadline) -> AsyncIterator[Replica]:
        """Have the engine alone, its state known. DEADLINE_EXCEEDED / REPLICA_BUSY if others do not finish in time."""
        try:
            async with asyncio.timeout(deadline.left):
                await self._lock.acquire()
        except TimeoutError:
            raise self._busy() from None
        try:
            await self._await_overdue(deadline)
            if self.replica.uncertain or self.replica.health is not Health.HEALTHY:
                await self.refresh(deadline.left)
            await self.carry_out(self.replica.plan_settle(), deadline)
            yield self.replica
        finally:
            self._lock.release()
            self.changed()

    async def carry_out(self, plan: Plan, deadline: Deadline) -> None:
        """Make the calls of a plan, in order. The caller has the engine alone."""
        self.shards = ()
        probed = False
        for call in plan.calls:
            if isinstance(call, Drain):
                with self.tally.command(call):
                    await self._drain(deadline, probed)
            elif not isinstance(call, Resume) or self.replica.state.paused:
                self.replica.attempted(call)
                self.changed()
                with self.tally.command(call):
                    answer = await self.command(self._make(call, deadline.left), deadline)
                self._check_shards(call, answer.shards)
                self.replica.applied(call)
                probed = answer.state is not None or not isinstance(call, ResetCaches)
                if answer.state is not None:
                    self._took_over(answer.state)
                elif probed:
                    await self.refresh(deadline.left)
                if not self.replica.confirms(call):
                    raise aborted(
                        "NOT_CONFIRMED",
                        f"{type(call).__name__}: the engine of {self.replica_id} said done, its state says otherwise",
                        replica_id=self.replica_id,
                    )

    async def command(self, work: Awaitable[T], deadline: Deadline) -> T:
        """Have the engine do something, within the deadline. A failure leaves the state in doubt until a probe.

        What was decided so far is durable before: an engine is never ahead of what is known of it.
        """
        try:
            await self._durable()
        except BaseException:
            if isinstance(work, Coroutine):
                work.close()
            raise
        task = asyncio.ensure_future(self._guard(work))
        try:
            await self._watch(task, deadline)
        except asyncio.CancelledError:
            # The service stops.
            task.cancel()
            raise
        if not task.done():
            self._overdue = task
            task.add_done_callback(lambda _: self.probe_wanted.set())
            self.replica.doubt()
            self.lost_touch()
            raise deadline_exceeded(
                "ENGINE_TIMEOUT",
                f"the engine of {self.replica_id} did not answer within {deadline.timeout:g} s",
                replica_id=self.replica_id,
            )
        if task.cancelled():
            raise unavailable("ENGINE_DEAD", f"the engine of {self.replica_id} died", replica_id=self.replica_id)
        try:
            return task.result()
        except TurnoutError as error:
            self.replica.doubt()
            await self._probe_after(error)
            raise

    async def _watch(self, task: asyncio.Task[T], deadline: Deadline) -> None:
        """Wait until a command is done, or its time is up, which may be moved meanwhile.

        A command can hang on an engine that is dead: such a one is cancelled, and fails as dead.
        """
        probe: asyncio.Task[EngineState] | None = None
        try:
            while not task.done() and deadline.left:
                awaited = {task} if probe is None else {task, probe}
                timeout = min(deadline.left, WATCH_S)
                await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return
                if probe is None:
                    probe = asyncio.ensure_future(self._look())
                elif probe.done():
                    error, probe = probe.exception(), None
                    if isinstance(error, TurnoutError) and error.code is Code.UNAVAILABLE:
                        self.note_failure(error)
                    if self.replica.health is Health.DEAD:
                        task.cancel()
                        await asyncio.wait({task})
        finally:
            if probe is not None:
                probe.cancel()
                await asyncio.gather(probe, return_exceptions=True)

    async def _look(self) -> EngineState:
        return await self._guard(self.backend.probe())

    async def refresh(self, timeout: float) -> None:
        """Probe the engine and take over what it tells; raises what the probe fails with."""
        try:
            state = await self.probe(timeout)
        except TurnoutError as error:
            self.note_failure(error)
            raise
        self._took_over(state)

    async def probe(self, timeout: float) -> EngineState:
        """Read the engine's state, without taking it over."""
        try:
            async with asyncio.timeout(min(timeout, self._probe_timeout)):
                return await self._guard(self.backend.probe())
        except TimeoutError:
            raise deadline_exceeded(
                "ENGINE_UNRESPONSIVE", f"the engine of {self.replica_id} answers no probe", replica_id=self.replica_id
            ) from None

    async def watch(self) -> None:
        """Wait for a sign that the engine is gone. It may be wrong: a probe has to tell."""
        await self._guard(self.backend.watch())

    async def probe_in_background(self) -> None:
        """Check the engine's health; take its state over only if no command was under way meanwhile."""
        quiet = not self._lock.locked()
        version = self.replica.state
        try:
            state = await self.probe(self._probe_timeout)
        except TurnoutError as error:
            self.note_failure(error)
            return
        if quiet and not self._lock.locked() and self.replica.state is version and not self.overdue:
            self._took_over(state)

    async def confirm_free(self) -> None:
        """Probe the engine again that was confirmed free: somebody else may have started it anew since. What cannot be
        probed is in doubt."""
        deadline = Deadline(self._probe_timeout)
        try:
            async with self.exclusive(deadline):
                await self.refresh(deadline.left)
        except TurnoutError:
            self.replica.doubt()
            self.probe_wanted.set()
            self.changed()

    def note_failure(self, error: TurnoutError) -> None:
        """A probe failed: the engine hangs, or is gone.

        One that cannot be reached is dead at the second probe in a row: the first may have met a restart of the
        network.
        """
        gone = error.reason == "ENGINE_DEAD" or (error.code is Code.UNAVAILABLE and self._unreached)
        self._unreached = error.code is Code.UNAVAILABLE
        if gone:
            if self.replica.health is not Health.DEAD:
                _LOG.warning("replica died", replica_id=self.replica_id, reason=error.message)
                self.tally.deaths += 1
            self.replica.mark_dead()
            if self._overdue is not None:
                self._overdue.cancel()
        elif self._unreached:
            self.probe_wanted.set()
        self.lost_touch()

    def suspect(self) -> None:
        """A request failed in a way that makes the engine suspicious: nothing goes there before a probe."""
        self.replica.doubt()
        self.probe_wanted.set()
        self.changed()

    def lost_touch(self) -> None:
        """The engine does not answer: its requests go on elsewhere."""
        self.replica.mark_unresponsive()
        self.changed()
        self.forwards.interrupt()

    @property
    def overdue(self) -> bool:
        """Whether a command is under way that nobody waits for any more."""
        return self._overdue is not None and not self._overdue.done()

    async def close(self) -> None:
        """Let go of the engine."""
        if self._overdue is not None:
            self._overdue.cancel()
        await self.backend.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _took_over(self, state: EngineState) -> None:
        self._unreached = False
        self.replica.answered(state)
        self.changed()

    def _make(self, call: Call, timeout: float) -> Awaitable[Answer]:
        match call:
            case Pause(mode=mode, clear_cache=clear_cache):
                return self.backend.pause(mode, clear_cache, timeout)
            case Sleep(level=level):
                return self.backend.sleep(level, timeout)
            case WakeUp(tags=tags):
                return self.backend.wake_up(sorted(tags), timeout)
            case ReleaseKv():
                return self.backend.release_kv_cache(timeout)
            case ResumeKv():
                return self.backend.resume_kv_cache(timeout)
            case ResetCaches(caches=caches, reset_running_requests=running, reset_connectors=connectors):
                return self.backend.reset_caches(caches, running, connectors, timeout)
            case Resume():
                return self.backend.resume(timeout)
            case Drain():
                raise AssertionError("a drain is no single call")

    async def _drain(self, deadline: Deadline, probed: bool) -> None:
        if probed and not self.forwards and not self.replica.state.running:
            return
        while True:
            # What the pause ended is read out first; what is left then came late, or from elsewhere.
            await self.forwards.emptied(min(DRAIN_TURN_S, deadline.left))
            await self.refresh(deadline.left)
            if not self.forwards and not self.replica.state.running:
                return
            if not deadline.left:
                raise deadline_exceeded(
                    "NOT_DRAINED", f"requests of {self.replica_id} did not end in time", replica_id=self.replica_id
                )
            await self.command(self.backend.abort(None), deadline)
            if not self.forwards:
                await asyncio.sleep(min(DRAIN_TURN_S, deadline.left))

    def _check_shards(self, call: Call, shards: Shards) -> None:
        self.shards = shards or self.shards
        reached = sum(shard.ok for shard in shards)
        if shards and reached < self.replica.spec.shards:
            self.replica.doubt()
            raise aborted(
                "SHARDS_MISSED",
                f"{type(call).__name__} reached {reached} of {self.replica.spec.shards} shards of {self.replica_id}",
                replica_id=self.replica_id,
            )

    async def _probe_after(self, error: TurnoutError) -> None:
        try:
            await self.refresh(self._probe_timeout)
        except TurnoutError:
            _LOG.debug("probe failed as well", replica_id=self.replica_id, reason=error.reason)

    async def _await_overdue(self, deadline: Deadline) -> None:
        if self._overdue is None:
            return
        await asyncio.wait({self._overdue}, timeout=deadline.left)
        if not self._overdue.done():
            raise self._busy()
        if not self._overdue.cancelled():
            self._overdue.exception()
        self._overdue = None

    async def _guard(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except TurnoutError:
            raise
        except Exception as error:
            _LOG.exception("an engine call failed unexpectedly", replica_id=self.replica_id)
            raise internal("ENGINE_ERROR", f"a call to the engine of {self.replica_id} failed") from error

    def _busy(self) -> TurnoutError:
        return deadline_exceeded(
            "REPLICA_BUSY",
            f"an earlier call to {self.replica_id} is still under way",
            replica_id=self.replica_id,
        )
