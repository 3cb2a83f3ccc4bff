"""All runs of this scheduler: how they are opened, saved and closed.

Invariants: a run is opened by one caller at a time, in a task of its own, so that a dropped call leaves no half-opened
run; the epoch is granted last, after everything that can refuse has been asked; a failed opening holds no lease and no
GPU that was not held before.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from services.runtime.errors import (
    Code,
    TurnoutError,
    aborted,
    failed_precondition,
    invalid_argument,
    not_found,
    require_id,
    stale_epoch,
)
from services.scheduler import lending
from services.scheduler.domain import config as configs
from services.scheduler.domain import events
from services.scheduler.domain.config import PolicyFactory, RunConfig
from services.scheduler.domain.events import LendKind
from services.scheduler.domain.holdings import Gpu
from services.scheduler.domain.lends import Lend
from services.scheduler.domain.resume import Resume, check_resume
from services.scheduler.domain.run import Run, SavedState
from services.scheduler.hosted import Answered, HostedRun, Tools
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.observer import Observer
from services.scheduler.peers import BUFFER, BufferPeer, Channels, EnginePeer, Replicas
from services.scheduler.steps import Steps

T = TypeVar("T")

_CLOSED_KEPT = 32
"""Closed runs whose events can still be read; beyond, the one closed longest ago is forgotten."""

_CHECKPOINTS_KEPT = 16
"""Saved states per run; trainers keep a handful of checkpoints and resume from one of the last."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What OpenRun asks for. `content` stands for all the call said."""

    run_id: str
    config: RunConfig
    buffer_target: str
    engine_target: str
    resume: Resume | None
    take_over: bool
    request_id: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """What OpenRun answers."""

    hosted: HostedRun
    epoch: int
    lend: Lend | None
    warmup_groups: int
    next_step: int
    allow_older: bool
    cursor: int


@dataclass(frozen=True, slots=True)
class SavedRun:
    """What Save answers."""

    checkpoint_id: str
    manifest_json: str


def _devices(config: RunConfig, replicas: Replicas) -> list[Gpu]:
    """The GPUs that a run holds: those it names, and those of the hybrids that are registered."""
    return [*config.hybrid_devices, *replicas.gpus] if config.hybrid_gpus > 0 else []


@contextmanager
def _checkpoints_needed() -> Iterator[None]:
    """Say plainly that the buffer has no checkpoints, if that is what fails."""
    try:
        yield
    except TurnoutError as error:
        if error.code is not Code.UNIMPLEMENTED:
            raise
        raise TurnoutError(
            Code.UNIMPLEMENTED,
            "CHECKPOINTS_UNAVAILABLE",
            "the run's buffer keeps no checkpoints; with external_data the scheduler's state is saved alone",
            error.metadata,
        ) from error


@dataclass(slots=True)
class _Entry:
    hosted: HostedRun
    steps: Steps
    observer: Observer
    opening: Opening
    opened: Opened


class Registry:
    """The runs."""

    def __init__(self, tools: Tools, channels: Channels, create: PolicyFactory, metrics: SchedulerMetrics) -> None:
        self._tools = tools
        self._channels = channels
        self._create = create
        self._metrics = metrics
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._saved: dict[str, OrderedDict[str, SavedState]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[object]] = set()

    # ------------------------------------------------------------------------------------------------ reading

    def get(self, run_id: str) -> HostedRun:
        """A run. Raises NOT_FOUND / RUN_NOT_FOUND."""
        return self._entry(run_id).hosted

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._entries

    def steps(self, run_id: str) -> Steps:
        """The calls of a run's trainer. Raises NOT_FOUND / RUN_NOT_FOUND."""
        return self._entry(run_id).steps

    def all(self) -> list[HostedRun]:
        """All runs, by id."""
        return [self._entries[run_id].hosted for run_id in sorted(self._entries)]

    def _entry(self, run_id: str) -> _Entry:
        if run_id not in self._entries:
            raise not_found("RUN_NOT_FOUND", f"no run {run_id!r} is known here", field="run_id", run_id=run_id)
        return self._entries[run_id]

    # ------------------------------------------------------------------------------------------------ opening

    async def open(self, opening: Opening) -> Opened:
        """Open a run, or take it over. A repeat with the same request_id gets the first answer."""
        require_id("run_id", opening.run_id)
        configs.check(opening.config, self._create)
        self._channels.get("buffer_target", opening.buffer_target)
        self._channels.get("engine_target", opening.engine_target)
        return await self._owned(opening.run_id, lambda: self._open(opening))

    async def _owned(self, run_id: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, done in a task of its own, one at a time per run."""

        async def locked() -> T:
            async with self._locks.setdefault(run_id, asyncio.Lock()):
                return await work()

        task = asyncio.get_running_loop().create_task(locked())
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The caller may be gone; an error that nobody reads must not be reported as lost.
            task.exception()

    async def _open(self, opening: Opening) -> Opened:
        entry = self._entries.get(opening.run_id)
        if entry is not None:
            again = self._repeated(entry, opening)
            if again is not None:
                return again
            self._check_alive(entry.hosted, opening)
        hosted = self._hosted(opening, None if entry is None else entry.hosted)
        state, replicas = await asyncio.gather(hosted.buffer.state(), hosted.engine.replicas())
        config, resume = opening.config, opening.resume
        if config.switching:
            await hosted.buffer.check_can_wait(state.step)
        step = check_resume(resume, None if entry is None else entry.hosted.run.step, state.step)
        saved = self._saved_state(opening)

        if entry is not None:
            await self._end_epoch(entry)
        held = self._tools.holdings.of(opening.run_id)
        self._tools.holdings.claim(opening.run_id, _devices(config, replicas))
        try:
            epoch = 1 + max(state.epoch, replicas.epoch, hosted.run.epoch)
            await hosted.engine.open_epoch(epoch)
            await hosted.buffer.open_epoch(epoch)
            cursor = await self._roll_back(hosted, opening, epoch)
            freed_s = await self._free_hybrids(hosted, epoch) if config.hybrid_gpus > 0 else 0.0
            warmup = await self._warmup(hosted, config, step)
        except BaseException:
            self._tools.holdings.claim(opening.run_id, held)
            raise

        run = hosted.run
        if saved is not None:
            run.restore(saved)
        run.open(epoch, config, resume, hosted.moment)
        run.taken_over(freed_s, hosted.moment)
        lend = await self._init_lend(hosted, step, allow_older=resume is not None)
        opened = Opened(hosted, epoch, lend, warmup, step + 1, resume is not None, cursor)
        self._enter(opening, opened)
        return opened

    def _repeated(self, entry: _Entry, opening: Opening) -> Opened | None:
        """The first answer, if `opening` repeats the one that opened the run last."""
        if not opening.request_id or opening.request_id != entry.opening.request_id:
            return None
        if opening.content != entry.opening.content:
            raise invalid_argument(
                "request_id",
                "this request_id opened the run with other content",
                value=opening.request_id,
                reason="REQUEST_ID_REUSED",
            )
        return entry.opened

    def _check_alive(self, hosted: HostedRun, opening: Opening) -> None:
        run, now = hosted.run, self._tools.clock.now()
        left_s = run.lease.left_s(now) * self._tools.clock.scale
        if run.is_open and left_s > 0 and not opening.take_over:
            raise failed_precondition(
                "TRAINER_ALIVE",
                f"the run's trainer (epoch {run.epoch}) gave a sign of life; its lease runs {left_s:.1f} s more: wait, "
                "close the run, or set take_over",
                lease_left=f"{left_s:.3f}s",
                epoch=run.epoch,
            )

    def _hosted(self, opening: Opening, before: HostedRun | None) -> HostedRun:
        """The run with peers as `opening` names them; its state is kept if it is known here."""
        settings, config, run_id = self._tools.settings, opening.config, opening.run_id
        buffer_channel = self._channels.get("buffer_target", opening.buffer_target)
        engine_channel = self._channels.get("engine_target", opening.engine_target)
        if before is not None:
            run = before.run
        else:
            tools = self._tools
            run = Run(run_id, config, self._create, settings.event_history, tools.clock.scale, tools.moment())
        return HostedRun(
            self._tools,
            run,
            BufferPeer(buffer_channel, opening.buffer_target, run_id, config.partition, settings.peer_timeout_s),
            EnginePeer(
                engine_channel,
                opening.engine_target,
                run_id,
                settings.peer_timeout_s,
                settings.transition_timeout_s,
                config.engine_timeout_s,
            ),
        )

    def _saved_state(self, opening: Opening) -> SavedState | None:
        """What the scheduler kept under the checkpoint that the trainer resumes from."""
        if opening.resume is None or not opening.resume.checkpoint_id:
            return None
        checkpoint_id = opening.resume.checkpoint_id
        kept = self._saved.get(opening.run_id)
        saved = None if kept is None else kept.get(checkpoint_id)
        if saved is None:
            raise not_found(
                "CHECKPOINT_NOT_FOUND",
                f"the scheduler keeps no state under checkpoint {checkpoint_id!r}",
                field="resume.checkpoint_id",
                value=checkpoint_id,
            )
        if saved.step != opening.resume.step:
            raise failed_precondition(
                "RESUME_MISMATCH",
                f"the trainer stands after step {opening.resume.step}, the checkpoint was saved at step {saved.step}",
                field="resume.resume_step",
                resume_step=opening.resume.step,
                checkpoint_step=saved.step,
            )
        return saved

    async def _end_epoch(self, entry: _Entry) -> None:
        """End the waits of the predecessor, and let the transition it has under way come to its end."""
        epoch = entry.hosted.run.epoch
        entry.hosted.stop_waits(stale_epoch(epoch, epoch + 1))
        await entry.hosted.joins.idle()
        await entry.observer.close()

    async def _roll_back(self, hosted: HostedRun, opening: Opening, epoch: int) -> int:
        """Restore the buffer if a checkpoint is named; the eviction cursor to start with."""
        resume, settings = opening.resume, self._tools.settings
        if resume is not None and resume.checkpoint_id and not opening.config.external_data:
            with _checkpoints_needed():
                request_id = f"{opening.request_id or self._tools.new_id()}/restore"
                return await hosted.buffer.restore(
                    epoch, resume.checkpoint_id, request_id, settings.transition_timeout_s
                )
        try:
            return (await hosted.buffer.cursor_now(None, 0, 0)).next_cursor
        except TurnoutError as error:
            if error.code is not Code.UNIMPLEMENTED:
                raise
            # A buffer that cannot wait has no cursor either; without switching that is allowed.
            return 0

    async def _free_hybrids(self, hosted: HostedRun, epoch: int) -> float:
        """Take back what a predecessor left lent: the new trainer needs its GPUs. The seconds it took."""
        began = self._tools.clock.now()
        replicas = await hosted.engine.replicas()
        if not any(hybrid.in_use for hybrid in replicas.hybrids.values()):
            return 0.0
        try:
            await hosted.engine.reclaim(epoch)
        except TurnoutError as error:
            raise aborted(
                "RECLAIM_FAILED",
                f"GPUs that a former trainer lent could not be taken back: {error.message}",
                **{**error.metadata, "cause": error.reason},
            ) from error
        return self._tools.clock.now() - began

    async def _warmup(self, hosted: HostedRun, config: RunConfig, step: int) -> int:
        """Prompts that the warm-up still needs."""
        if config.warmup_groups == 0:
            return 0
        depth = await hosted.buffer.raw_depth(step)
        present = depth.counts.pending + depth.counts.running + depth.counts.finished
        return max(0, config.warmup_groups - present)

    async def _init_lend(self, hosted: HostedRun, step: int, *, allow_older: bool) -> Lend | None:
        """The lend of a run's start, None if there is nothing to lend."""
        run = hosted.run
        if not run.can_lend:
            return None
        await lending.look(hosted)
        lend = Lend(self._tools.new_id(), LendKind.INIT, step, allow_older)
        await lending.begin_init(hosted, lend)
        run.order.lending(lend.lend_id)
        return lend

    def _enter(self, opening: Opening, opened: Opened) -> None:
        known = self._entries.pop(opening.run_id, None)
        if known is None:
            self._metrics.follow(opened.hosted.run)
        observer = Observer(opened.hosted)
        entry = _Entry(opened.hosted, Steps(opened.hosted), observer, opening, opened)
        self._entries[opening.run_id] = entry
        observer.start()

    # ------------------------------------------------------------------------------------------ life and care

    async def close_run(self, run_id: str, epoch: int, reason: str) -> None:
        """End a run; closing it again is OK. GPUs stay where they are."""
        await self._owned(run_id, lambda: self._close_run(run_id, epoch, reason))

    async def _close_run(self, run_id: str, epoch: int, reason: str) -> None:
        entry = self._entry(run_id)
        run = entry.hosted.run
        run.check_epoch(epoch)
        if not run.is_open:
            return
        await self._end(entry)
        self._tools.holdings.release(run_id)
        run.close(reason, entry.hosted.moment)
        self._entries.move_to_end(run_id)
        closed = [known for known, other in self._entries.items() if not other.hosted.run.is_open]
        for forgotten in closed[:-_CLOSED_KEPT]:
            del self._entries[forgotten]
            self._saved.pop(forgotten, None)

    async def _end(self, entry: _Entry) -> None:
        entry.hosted.stop_waits(entry.hosted.closed())
        await entry.hosted.joins.cancel()
        await entry.observer.close()

    def update(self, hosted: HostedRun, config: RunConfig) -> None:
        """Take `config` over from the next step on. Raises as opening with it would."""
        hosted.run.reconfigure(configs.check(config, self._create))

    async def save(self, hosted: HostedRun, step: int) -> Answered:
        """Checkpoint the buffer, and keep the scheduler's state under the same id."""
        run = hosted.run
        checkpoint_id = f"{run.epoch}-{step}-{self._tools.new_id()}"
        if not run.config.external_data:
            with _checkpoints_needed():
                checkpoint_id = await hosted.buffer.checkpoint(
                    run.epoch, step, checkpoint_id, self._tools.settings.transition_timeout_s
                )
        kept = self._saved.setdefault(run.run_id, OrderedDict())
        kept[checkpoint_id] = run.save()
        while len(kept) > _CHECKPOINTS_KEPT:
            kept.popitem(last=False)
        run.record(events.Saved(step, checkpoint_id), hosted.moment)
        manifest = {
            "version": 1,
            "run_id": run.run_id,
            "checkpoint_id": checkpoint_id,
            "step": step,
            "epoch": run.epoch,
            "buffer": not run.config.external_data,
        }
        return Answered(SavedRun(checkpoint_id, json.dumps(manifest, sort_keys=True)))

    async def heartbeat(self, hosted: HostedRun) -> float:
        """The trainer lives: renew its sample leases too. Wall seconds until the next sign of life is due."""
        try:
            await hosted.buffer.renew_epoch(hosted.run.epoch)
        except TurnoutError as error:
            # A buffer that restarts renews its leases by itself; the heartbeat of the trainer counts all the same.
            if error.reason != BUFFER and error.code not in (Code.UNAVAILABLE, Code.UNIMPLEMENTED):
                raise
        return hosted.run.lease.left_s(self._tools.clock.now()) * self._tools.clock.scale

    async def drain(self) -> None:
        """Let the transitions under way come to their end; waits end by themselves as the service drains."""
        await asyncio.gather(*(entry.hosted.joins.idle() for entry in self._entries.values()))

    async def close(self) -> None:
        """Stop everything."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in self._entries.values():
            await entry.hosted.joins.cancel()
            await entry.observer.close()
