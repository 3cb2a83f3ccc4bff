"""Opening a run: what is asked, in which order, and what has changed when it fails.

Invariants: everything that can refuse is asked before the predecessor is fenced off; then the predecessor's waits end,
and its transition comes to an end before a GPU is moved for the successor; a failed opening holds no lease, and no GPU
that was not held before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.runtime.draining import draining_error
from services.runtime.errors import Code, TurnoutError, aborted, failed_precondition, stale_epoch
from services.runtime.idempotency import fingerprint
from services.scheduler import lending
from services.scheduler.buffer_peer import BufferPeer
from services.scheduler.checkpoints import Checkpoints, checkpoints_needed
from services.scheduler.convert import config_from_proto, lend_to_proto, resume_from_proto
from services.scheduler.domain.config import PolicyFactory, RunConfig
from services.scheduler.domain.events import LendKind
from services.scheduler.domain.lends import Lend
from services.scheduler.domain.log import EventLog
from services.scheduler.domain.resume import Resume, check_resume
from services.scheduler.domain.run import Run
from services.scheduler.engine_peer import EnginePeer
from services.scheduler.hosted import Following, HostedRun, Tools
from services.scheduler.links import Links
from services.scheduler.packing import PACKING
from turnout.scheduler.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class Opening:
    """What OpenRun asks for. `content` stands for all the call said, `request` is all of it."""

    run_id: str
    config: RunConfig
    buffer_target: str
    engine_target: str
    resume: Resume | None
    take_over: bool
    request_id: str
    content: bytes
    request: bytes

    @property
    def checkpoint_id(self) -> str:
        """Checkpoint to roll back to, empty if none."""
        return "" if self.resume is None else self.resume.checkpoint_id


def opening_of(request: scheduler_pb2.OpenRunRequest) -> Opening:
    """What a request asks for. Raises INVALID_ARGUMENT naming the field."""
    return Opening(
        request.run_id,
        config_from_proto(request.config),
        request.buffer_target,
        request.engine_target,
        resume_from_proto(request),
        request.take_over,
        request.request_id,
        fingerprint(request),
        request.SerializeToString(),
    )


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that was opened, and what the caller is told beside it."""

    hosted: HostedRun
    lend: Lend | None
    warmup_groups: int
    cursor: int

    def answer(self) -> scheduler_pb2.OpenRunResponse:
        """What OpenRun answers."""
        run = self.hosted.run
        return scheduler_pb2.OpenRunResponse(
            epoch=run.epoch,
            lend=None if self.lend is None else _init_lend(self.lend),
            warmup_groups=self.warmup_groups,
            next_step=run.step + 1,
            run=self.hosted.shown(),
            allow_older=run.resumed,
            time_scale=self.hosted.tools.clock.scale,
            cursor=self.cursor,
        )


def _init_lend(lend: Lend) -> scheduler_pb2.Lend:
    message = lend_to_proto(lend)
    # All hybrids that are registered before CompleteLend take part, those still to come too.
    del message.replica_ids[:]
    return message


class Opener:
    """Opens runs, one at a time per run."""

    def __init__(self, tools: Tools, links: Links, create: PolicyFactory, checkpoints: Checkpoints) -> None:
        self._tools = tools
        self._links = links
        self._create = create
        self._checkpoints = checkpoints

    async def open(self, opening: Opening, before: HostedRun | None) -> Opened:
        """Open the run, or take it over from `before`."""
        if before is not None:
            self._check_alive(before, opening)
        hosted = self._hosted(opening, before)
        run, config, resume = hosted.run, opening.config, opening.resume
        state, replicas = await asyncio.gather(hosted.buffer.state(), hosted.engine.replicas())
        if config.switching:
            await hosted.buffer.check_can_wait(state.step)
        step = check_resume(resume, None if before is None else run.step, state.step)
        saved = self._checkpoints.find(opening.run_id, resume)

        held = self._tools.holdings.of(opening.run_id)
        wanted = [*config.hybrid_devices, *replicas.gpus] if config.hybrid_gpus > 0 else []
        self._tools.holdings.claim(opening.run_id, [*held, *wanted])
        try:
            epoch = 1 + max(state.epoch, replicas.epoch, run.epoch)
            await hosted.engine.open_epoch(epoch)
            await hosted.buffer.open_epoch(epoch)
            if before is not None:
                before.fence(stale_epoch(run.epoch, epoch))
                await before.joins.idle()
                await before.stop_following()
            cursor = await self._roll_back(hosted, opening, epoch)
            freed_s = await self._free_hybrids(hosted, epoch) if config.hybrid_gpus > 0 else 0.0
            warmup = await self._warmup(hosted, config, step)
            replicas = await hosted.engine.replicas()
            group_event = await hosted.buffer.next_group_event()
        except BaseException:
            self._tools.holdings.claim(opening.run_id, held)
            raise
        self._tools.holdings.claim(opening.run_id, wanted)
        # From here on nothing can refuse it, and what becomes of the run is that of its new trainer.
        hosted.following = Following(group_event)
        if before is not None and before.buffer.target == opening.buffer_target and not opening.checkpoint_id:
            # Group events go on from where the predecessor stopped.
            hosted.following.next_group_event = before.following.next_group_event
        run.modes.saw(replicas.incarnation, replicas.free if config.hybrid_gpus > 0 else {})
        run.open(epoch, config, resume, hosted.moment, saved)
        run.taken_over(freed_s, hosted.moment)
        self._tools.keeping.follow(hosted)
        lend = await self._init_lend(hosted, step, allow_older=resume is not None)
        return Opened(hosted, lend, warmup, cursor)

    def _check_alive(self, before: HostedRun, opening: Opening) -> None:
        run, clock = before.run, self._tools.clock
        left_s = run.lease.left_s(clock.now()) * clock.scale
        if run.is_open and left_s > 0 and not opening.take_over:
            raise failed_precondition(
                "TRAINER_ALIVE",
                f"the run's trainer (epoch {run.epoch}) gave a sign of life; its lease runs {left_s:.1f} s more: wait, "
                "close the run, or set take_over",
                lease_left=f"{left_s:.3f}s",
                epoch=run.epoch,
            )

    def _hosted(self, opening: Opening, before: HostedRun | None) -> HostedRun:
        if before is not None:
            return self.hosted(opening, before.run)
        tools = self._tools
        log, scale, now = EventLog(tools.settings.event_history, PACKING), tools.clock.scale, tools.moment()
        return self.hosted(opening, Run(opening.run_id, opening.config, self._create, log, scale, now))

    def hosted(self, opening: Opening, run: Run) -> HostedRun:
        """`run` with peers as `opening` names them."""
        tools, settings, config, run_id = self._tools, self._tools.settings, opening.config, opening.run_id
        return HostedRun(
            tools,
            run,
            BufferPeer(
                self._links.get("buffer_target", opening.buffer_target),
                opening.buffer_target,
                run_id,
                config.partition,
                settings.peer_timeout_s,
            ),
            EnginePeer(
                self._links.get("engine_target", opening.engine_target),
                opening.engine_target,
                run_id,
                settings.peer_timeout_s,
                settings.transition_timeout_s,
                config.engine_timeout_s,
            ),
            opening.request,
        )

    async def _roll_back(self, hosted: HostedRun, opening: Opening, epoch: int) -> int:
        """Restore the buffer if a checkpoint is named; the eviction cursor to start with."""
        if opening.checkpoint_id and not opening.config.external_data:
            request_id = f"{opening.request_id or self._tools.new_id()}/restore"
            with checkpoints_needed():
                return await hosted.buffer.restore(
                    epoch, opening.checkpoint_id, request_id, self._tools.settings.transition_timeout_s
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
            patience_s = self._tools.settings.reclaim_patience_s
            await lending.persist(hosted, lambda: hosted.engine.reclaim(epoch), patience_s)
        except TurnoutError as error:
            if self._tools.draining.is_set:
                # The next process goes on with it, once the trainer repeats the call.
                raise draining_error() from error
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
        counts = (await hosted.buffer.raw_depth(step)).counts
        return max(0, config.warmup_groups - counts.pending - counts.running - counts.finished)

    async def _init_lend(self, hosted: HostedRun, step: int, *, allow_older: bool) -> Lend | None:
        """The lend of a run's start, None if there is nothing to lend."""
        run = hosted.run
        if not run.can_lend:
            return None
        lend = Lend(self._tools.new_id(), LendKind.INIT, step, allow_older)
        await lending.begin_init(hosted, lend)
        run.order.lending(lend.lend_id)
        return lend
