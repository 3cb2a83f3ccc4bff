"""All runs of this scheduler: how they come, live and go.

Invariants: a run is opened and closed by one caller at a time, in a task of its own, so that a dropped call leaves
nothing half done; a run that is closed can be read until many others were closed after it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from services.runtime.errors import Code, TurnoutError, invalid_argument, not_found, require_id
from services.runtime.logs import get_logger
from services.scheduler import lending
from services.scheduler.checkpoints import Checkpoints
from services.scheduler.domain import config as configs
from services.scheduler.domain.config import PolicyFactory, RunConfig
from services.scheduler.hosted import HostedRun, Tools
from services.scheduler.links import Links
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.observer import Observer
from services.scheduler.opening import Opener, Opening
from services.scheduler.trainer_calls import TrainerCalls
from turnout.scheduler.v1.scheduler_pb2 import OpenRunResponse

T = TypeVar("T")

_log = get_logger("scheduler")

_CLOSED_KEPT = 32
"""Closed runs whose events can still be read; beyond, the one closed longest ago is forgotten."""

_RENEWAL_S = 1.0
"""Domain seconds between two renewals of sample leases, which live for minutes: heartbeats in between cost no call."""


@dataclass(slots=True)
class _Entry:
    hosted: HostedRun
    calls: TrainerCalls
    observer: Observer
    opening: Opening
    answer: OpenRunResponse | None
    """What OpenRun answered, None if an earlier process was cut before it did."""
    renewal: asyncio.Task[None] | None = None
    """The last renewal of its sample leases, which a heartbeat began."""
    renewed_at: float = -math.inf


class Registry:
    """The runs."""

    def __init__(self, tools: Tools, links: Links, create: PolicyFactory, metrics: SchedulerMetrics) -> None:
        self.checkpoints = Checkpoints()
        self._tools = tools
        self._links = links
        self._create = create
        self.opener = Opener(tools, links, create, self.checkpoints)
        self._metrics = metrics
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by the tasks that use them, so ids that nobody opens leave none behind."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opening: Counter[str] = Counter()
        """Targets that the runs being opened name."""
        self._suspended: TurnoutError | None = None
        """What every call ends with while what is stored is read again."""

    # ------------------------------------------------------------------------------------------------ reading

    def get(self, run_id: str) -> HostedRun:
        """A run. Raises NOT_FOUND / RUN_NOT_FOUND."""
        return self._entry(run_id).hosted

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._entries

    def calls(self, run_id: str) -> TrainerCalls:
        """The calls of a run's trainer. Raises NOT_FOUND / RUN_NOT_FOUND."""
        return self._entry(run_id).calls

    def all(self) -> list[HostedRun]:
        """All runs, by id."""
        self._check()
        return [self._entries[run_id].hosted for run_id in sorted(self._entries)]

    @property
    def present(self) -> list[HostedRun]:
        """The same for who only looks: none while what is stored is read again."""
        return [entry.hosted for entry in self._entries.values()]

    def _check(self) -> None:
        if self._suspended is not None:
            error = self._suspended
            raise TurnoutError(error.code, error.reason, error.message, error.metadata)

    def _entry(self, run_id: str) -> _Entry:
        self._check()
        if run_id not in self._entries:
            raise not_found("RUN_NOT_FOUND", f"no run {run_id!r} is known here", field="run_id", run_id=run_id)
        return self._entries[run_id]

    # ------------------------------------------------------------------------------------------------ opening

    async def open(self, opening: Opening) -> OpenRunResponse:
        """Open a run, or take it over. A repeat with the same request_id gets the first answer."""
        self._check()
        require_id("run_id", opening.run_id)
        configs.check(opening.config, self._create)
        return await self._owned(opening.run_id, lambda: self._connected(opening))

    async def _owned(self, run_id: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, done in a task of its own, one at a time per run."""

        async def locked() -> T:
            async with self._locks.setdefault(run_id, asyncio.Lock()):
                return await work()

        return await asyncio.shield(self._begin(locked()))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The caller may be gone; an error that nobody reads must not be reported as lost.
            task.exception()

    async def _connected(self, opening: Opening) -> OpenRunResponse:
        """Open the run; no connection stays that no run uses."""
        named = (opening.buffer_target, opening.engine_target)
        self._opening.update(named)
        try:
            return await self._open(opening)
        finally:
            self._opening.subtract(named)
            self._drop_links()

    def _drop_links(self) -> None:
        self._opening = +self._opening
        used = set(self._opening)
        for entry in self._entries.values():
            if entry.hosted.run.is_open:
                used |= {entry.hosted.buffer.target, entry.hosted.engine.target}
        self._links.keep(used)

    async def _open(self, opening: Opening) -> OpenRunResponse:
        entry = self._entries.get(opening.run_id)
        answer = None if entry is None else self._repeated(entry, opening)
        if answer is None:
            opened = await self.opener.open(opening, None if entry is None else entry.hosted)
            answer = opened.answer()
            opened.hosted.answered = answer.SerializeToString()
            if entry is None:
                self._metrics.follow(opened.hosted.run)
            self._enter(opened.hosted, opening, answer)
        await self._entries[opening.run_id].hosted.durable()
        return answer

    def _repeated(self, entry: _Entry, opening: Opening) -> OpenRunResponse | None:
        """The first answer, if `opening` repeats the one that opened the run last."""
        if entry.answer is None or not opening.request_id or opening.request_id != entry.opening.request_id:
            return None
        if opening.content != entry.opening.content:
            raise invalid_argument(
                "request_id",
                "this request_id opened the run with other content",
                value=opening.request_id,
                reason="REQUEST_ID_REUSED",
            )
        return entry.answer

    def _enter(self, hosted: HostedRun, opening: Opening, answer: OpenRunResponse | None) -> _Entry:
        observer = Observer(hosted)
        entry = _Entry(hosted, TrainerCalls(hosted, self.checkpoints), observer, opening, answer)
        self._entries[opening.run_id] = entry
        self._entries.move_to_end(opening.run_id)
        if hosted.run.is_open and not hosted.run.closing:
            observer.start()
        return entry

    # ----------------------------------------------------------------------------------------------- restarting

    def restore(self, hosted: HostedRun, opening: Opening, answer: OpenRunResponse | None) -> None:
        """Host a run again that was read back; what its trainer was waiting for begins with `go_on`."""
        self._metrics.follow(hosted.run)
        self._enter(hosted, opening, answer)

    def go_on(self) -> None:
        """Take calls, and go on with those that an earlier process was working on."""
        self._suspended = None
        self._metrics.keep(self._entries)
        for entry in self._entries.values():
            hosted, undertaking = entry.hosted, entry.hosted.undertaking
            if undertaking is None or not hosted.run.is_open or hosted.fenced is not None:
                continue
            if undertaking.key not in hosted.run.order.expected():
                continue
            # A wait alone is taken up when its trainer repeats the call: nobody would hear its refills before.
            if undertaking.began or hosted.run.modes.in_between:
                _log.info("going on", run_id=hosted.run.run_id, call=str(undertaking.key))
                hosted.begin(entry.calls.resumed(undertaking))

    async def suspend(self, error: TurnoutError) -> None:
        """Forget everything: memory holds what is not stored. Calls end with `error` until `go_on`."""
        self._suspended = error
        await self._cancel(list(self._tasks))
        for entry in self._entries.values():
            entry.hosted.fence(error)
            entry.hosted.run.log.end(error)
            await entry.hosted.joins.cancel()
            await entry.observer.close()
            self._tools.holdings.release(entry.hosted.run.run_id)
            self.checkpoints.forget(entry.hosted.run.run_id)
        self._entries.clear()

    # ------------------------------------------------------------------------------------------ life and care

    async def close_run(self, run_id: str, epoch: int, reason: str, *, engines_gone: bool) -> None:
        """End a run; closing it again is OK. GPUs that are lent are taken back first, unless their engines are gone.

        Raises ABORTED / RECLAIM_FAILED or ABORT_LEND_FAILED; then the run holds its GPUs, and takes no other call.
        """
        await self._owned(run_id, lambda: self._close_run(run_id, epoch, reason, engines_gone=engines_gone))

    async def _close_run(self, run_id: str, epoch: int, reason: str, *, engines_gone: bool) -> None:
        entry = self._entry(run_id)
        run = entry.hosted.run
        run.check_epoch(epoch)
        if not run.is_open:
            await entry.hosted.durable()
            return
        run.closing = True
        await self._end(entry)
        await entry.hosted.durable()
        if not engines_gone:
            # The next run that holds these GPUs must find no engine of this one awake.
            await lending.ensure_trainer(entry.hosted)
        self._tools.holdings.release(run_id)
        entry.hosted.undertaking = None
        run.close(reason, entry.hosted.moment)
        self._entries.move_to_end(run_id)
        closed = [known for known, other in self._entries.items() if not other.hosted.run.is_open]
        for forgotten in closed[:-_CLOSED_KEPT]:
            del self._entries[forgotten]
            self._metrics.forget(forgotten)
            self.checkpoints.forget(forgotten)
            self._tools.keeping.forget(forgotten)
        await entry.hosted.durable()
        self._drop_links()

    async def _end(self, entry: _Entry) -> None:
        # A call that came between the end of the others and the closing would begin a wait that nobody ends.
        entry.hosted.fence(entry.hosted.closed())
        await entry.hosted.joins.cancel()
        await entry.observer.close()

    def update(self, hosted: HostedRun, config: RunConfig) -> None:
        """Take `config` over from the next step on. Raises as opening with it would."""
        hosted.run.reconfigure(configs.check(config, self._create))

    def heartbeat(self, hosted: HostedRun) -> float:
        """The trainer lives: renew its sample leases too. Wall seconds until the next sign of life is due.

        The buffer is not waited for, nor asked at every heartbeat: what it refuses, the next that asks raises.
        """
        entry, now = self._entry(hosted.run.run_id), self._tools.clock.now()
        before = entry.renewal
        if now - entry.renewed_at >= _RENEWAL_S and (before is None or before.done()):
            entry.renewed_at = now
            entry.renewal = self._begin(hosted.buffer.renew_epoch(hosted.run.epoch))
            refused = None if before is None or before.cancelled() else before.exception()
            # A buffer that restarts renews its leases by itself; the heartbeat of the trainer counts all the same.
            passes = isinstance(refused, TurnoutError) and refused.code in (Code.UNAVAILABLE, Code.UNIMPLEMENTED)
            if refused is not None and not passes:
                raise refused
        return hosted.run.lease.left_s(now) * self._tools.clock.scale

    async def drain(self) -> None:
        """Let the transitions under way come to their end; waits end by themselves as the service drains."""
        await asyncio.gather(*(entry.hosted.joins.idle() for entry in self._entries.values()))

    async def close(self) -> None:
        """Stop everything."""
        await self._cancel(list(self._tasks))
        for entry in self._entries.values():
            await entry.hosted.joins.cancel()
            await entry.observer.close()

    @staticmethod
    async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
