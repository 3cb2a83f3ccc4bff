"""What each of a trainer's calls does, beyond its place in the order.

Invariants: the depth is read before anything is noted, so that a buffer that does not answer leaves no half-noted step;
the policy decides, and this carries it out; a lend that does not come about lets the trainer proceed. Each call notes
in its undertaking how far it came and can be begun again from there; between its last effect and its end it awaits
nothing, so that no call is half answered.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from services.runtime.errors import TurnoutError, aborted
from services.scheduler import lending
from services.scheduler.domain import events
from services.scheduler.domain.calls import CallKey, Ending
from services.scheduler.domain.events import LendKind, Mode
from services.scheduler.domain.lends import Lend
from services.scheduler.domain.sync import Sync
from services.scheduler.hosted import Answered, HostedRun, TrainerCall
from services.scheduler.policies import decision_metrics
from services.scheduler.policies.types import Action, Decision, Point
from services.scheduler.undertaking import Outcome, Undertaking, WaitEnd
from services.scheduler.waiting import ABANDONED, EXHAUSTED, HELD, REACHED, TIMED_OUT, Event, Wait
from turnout.buffer.v1 import buffer_pb2


@dataclass(frozen=True, slots=True)
class BeganStep:
    """Answer of BeginStep."""

    mode: Mode
    reclaimed: bool
    decision: Decision | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Answer of PrepareStep. `done`: the buffer's last word, None if nothing waited."""

    outcome: Outcome
    mode: Mode
    reclaimed: bool
    done: buffer_pb2.WaitDone | None
    cursor: int
    metrics: Mapping[str, float]
    decision: Decision | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Answer of BeginSample: PROCEED, unless `lend` or `timed_out` is set. reclaim_s: None if nothing was reclaimed."""

    cursor: int
    sampleable: int = 0
    lend: Lend | None = None
    timed_out: str = ""
    reclaim_s: float | None = None
    outcome: Outcome | None = None
    reason: str = ""
    done: buffer_pb2.WaitDone | None = None
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class EndedStep:
    """Answer of EndStep."""

    lend: Lend | None
    decision: Decision
    metrics: Mapping[str, float]
    lend_failure: str = ""


@dataclass(frozen=True, slots=True)
class CompletedLend:
    """Answer of CompleteLend."""

    cost_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Nothing:
    """Answer of a call that says nothing."""


class Steps:
    """The calls of one hosted run's trainer."""

    def __init__(self, hosted: HostedRun) -> None:
        self._hosted = hosted
        self._waits: dict[CallKey, Wait] = {}
        hosted.stop_waits = self._stop_waits
        hosted.wake_waits = self._wake_waits

    def _stop_waits(self, error: Exception) -> None:
        for wait in self._waits.values():
            wait.stop(error)

    def _wake_waits(self) -> None:
        for wait in self._waits.values():
            wait.wake()

    # --------------------------------------------------------------------------------------------------- steps

    async def begin_step(self, call: Undertaking, step: int, standalone: Sync | None) -> Answered:
        """Open `step`, and reclaim if the policy says so."""
        hosted, run = self._hosted, self._hosted.run
        if not call.decided:
            asks = run.modes.lent and run.next_config.switching
            if asks:
                await hosted.read_progress(Point.STEP_BEGIN)
            depth = await hosted.buffer.depth(step) if asks else None
            if standalone is not None and not run.announced(step):
                self._synced(standalone, False, step - 1)
            run.begin_step(step, hosted.moment)
            if run.modes.lent:
                if depth is not None:
                    run.observe_depth(depth, hosted.moment)
                call.decision = run.decide(Point.STEP_BEGIN, step, hosted.moment)
            call.decided = True
        reclaimed = False
        if call.decision is None:
            reclaimed = await lending.ensure_trainer(hosted, patient=True) is not None
        elif call.decision.action is Action.RECLAIM:
            await lending.take_back(hosted, patient=True)
            reclaimed = True
        return Answered(BeganStep(run.mode, reclaimed, call.decision))

    async def prepare_step(self, call: Undertaking, cursor: int, wait: Wait) -> Answered:
        """Wait with the GPUs lent until the policy takes them back; at once if they are not lent."""
        hosted, run = self._hosted, self._hosted.run
        end = call.wait_end
        if end is None:
            if not run.modes.lent:
                reclaimed = await lending.ensure_trainer(hosted, patient=True) is not None
                return Answered(Prepared(REACHED, run.mode, reclaimed, None, cursor, run.timings.metrics()))
            end = await wait.run()
            run.timings.waited(end.waited_s)
            if end.outcome in (TIMED_OUT, HELD):
                return Answered(self._prepared(end, reclaimed=False), Ending.TIMED_OUT)
            call.wait_end = end
        await lending.take_back(hosted, patient=True)
        ending = Ending.EXHAUSTED if end.outcome == EXHAUSTED else Ending.DONE
        return Answered(self._prepared(end, reclaimed=True), ending)

    def wait_for_step(self, step: int, cursor: int) -> Wait:
        """What PrepareStep of `step` waits for."""
        return Wait(self._hosted, step, self._target(self._hosted.run.config.train_batch_size), cursor)

    def _prepared(self, end: WaitEnd, *, reclaimed: bool) -> Prepared:
        run = self._hosted.run
        metrics = run.timings.metrics()
        if not reclaimed:
            metrics.pop("timing_s/switch_to_trainer", None)
        metrics.update(end.done.evictions.metrics)
        return Prepared(
            end.outcome, run.mode, reclaimed, end.done, end.done.next_cursor, metrics, end.decision, end.reason
        )

    async def end_step(self, call: Undertaking, step: int) -> Answered:
        """Close `step`, and lend if the policy says so."""
        hosted, run = self._hosted, self._hosted.run
        if not call.decided:
            await hosted.read_progress(Point.STEP_END)
            depth = await hosted.buffer.depth(step + 1) if run.config.switching else None
            run.record(events.StepEnded(step), hosted.moment)
            if depth is not None:
                run.observe_depth(depth, hosted.moment)
            call.decision = run.decide(Point.STEP_END, step, hosted.moment)
            if run.config.switching:
                call.metrics = {**decision_metrics(call.decision), **run.timings.metrics()}
                run.record(events.StepMetrics(step, call.metrics), hosted.moment)
            if call.decision.action is Action.LEND:
                call.lend_id = hosted.tools.new_id()
            call.decided = True
        lend, _ = await self._lend(call, LendKind.STEP_END, step)
        assert call.decision is not None
        ended = EndedStep(lend, call.decision, call.metrics, call.lend_failure)
        return Answered(ended, Ending.LEND, lend.lend_id) if lend else Answered(ended)

    async def _lend(
        self, call: Undertaking, kind: LendKind, weight_version: int
    ) -> tuple[Lend | None, TurnoutError | None]:
        """The lend that the call decided on, once it began, or why it did not; neither if it decided on none."""
        hosted, run = self._hosted, self._hosted.run
        if not call.lend_id:
            return None, None
        if call.lend_failure:
            failure = aborted("LEND_FAILED", call.lend_failure, mode=run.mode.name)
        else:
            lend = run.lends.open
            if lend is None or lend.lend_id != call.lend_id:
                lend = Lend(call.lend_id, kind, weight_version, run.resumed)
            try:
                placement = None if call.decision is None else call.decision.placement
                await lending.begin(hosted, lend, placement, keep_sessions=kind is LendKind.VALIDATION)
            except TurnoutError as error:
                call.lend_failure = error.message
                failure = error
            else:
                return lend, None
        if run.lends.was_open(call.lend_id):
            await lending.undo(hosted)
        return None, failure

    # ---------------------------------------------------------------------------------------------- mini-batches

    async def begin_sample(self, call: Undertaking, cursor: int, wait: Wait) -> Answered:
        """Announce a mini-batch: proceed, lend, or (after a lend) wait until the policy takes the GPUs back."""
        if call.key.attempt == 0:
            return await self._first_sample(call, cursor)
        if call.wait_end is None and not self._hosted.run.modes.lent:
            return await self._proceed(call.key.step, cursor)
        return await self._wait_in_step(call, wait)

    def wait_for_sample(self, step: int, mini_batch: int, cursor: int) -> Wait:
        """What BeginSample waits for while the GPUs are lent."""
        config = self._hosted.run.config
        rest = config.train_batch_size - mini_batch * config.mini_batch_size
        return Wait(self._hosted, step, self._target(max(1, rest)), cursor)

    async def _first_sample(self, call: Undertaking, cursor: int) -> Answered:
        hosted, run, key = self._hosted, self._hosted.run, call.key
        if not call.decided:
            await hosted.read_progress(Point.SAMPLE_BEGIN)
            depth = await hosted.buffer.depth(key.step)
            run.begin_sample(key.mini_batch, depth, hosted.moment)
            call.sampleable = depth.sampleable
            call.decision = run.decide(Point.SAMPLE_BEGIN, key.step, hosted.moment)
            if call.decision.action is Action.LEND and run.config.can_reinstall and run.mode is Mode.TRAINER:
                call.lend_id = hosted.tools.new_id()
            call.decided = True
        lend, _ = await self._lend(call, LendKind.WITHIN_STEP, key.step - 1)
        if lend is not None:
            return Answered(Sampled(cursor, lend=lend, decision=call.decision), Ending.LEND, lend.lend_id)
        if run.modes.in_between:
            # A lend could neither begin nor be undone: PROCEED would let two use the same memory. (A replica that fell
            # ill since the step began is no such thing, and waits for the next step.)
            await lending.ensure_trainer(hosted, patient=True)
        return Answered(Sampled(cursor, call.sampleable, decision=call.decision))

    async def _proceed(self, step: int, cursor: int) -> Answered:
        await lending.ensure_trainer(self._hosted, patient=True)
        return Answered(Sampled(cursor, (await self._hosted.buffer.depth(step)).sampleable))

    async def _wait_in_step(self, call: Undertaking, wait: Wait) -> Answered:
        end = call.wait_end or await wait.run()
        cursor = end.done.next_cursor
        if end.outcome in (TIMED_OUT, HELD):
            timed_out = end.reason or "the time to wait has passed with the GPUs lent"
            sampled = Sampled(cursor, timed_out=timed_out, done=end.done, decision=end.decision)
            return Answered(sampled, Ending.TIMED_OUT)
        call.wait_end = end
        reclaim_s = await lending.take_back(self._hosted, patient=True)
        sampleable = end.done.depth.sampleable
        return Answered(
            Sampled(
                cursor,
                sampleable,
                reclaim_s=reclaim_s,
                outcome=end.outcome,
                reason=end.reason,
                done=end.done,
                decision=end.decision,
            )
        )

    async def end_sample(self, call: Undertaking, wait_s: float, tokens: int | None) -> Answered:
        """Note how long the trainer waited for its mini-batch."""
        self._hosted.run.end_sample(call.key.step, call.key.mini_batch, wait_s, tokens, self._hosted.moment)
        return Answered(Nothing())

    # ---------------------------------------------------------------------------------------------------- waits

    def _target(self, without_threshold: int) -> int:
        """Groups to wait for: the policy's threshold, else as many as there is use for."""
        threshold = self._hosted.run.threshold
        return without_threshold if threshold is None else threshold

    async def waiting(
        self, wait: Wait, budget_s: float, make: Callable[[Wait], TrainerCall]
    ) -> AsyncGenerator[Event | object, None]:
        """The events of `wait`, in which the call that `make` makes is answered, or of the one under way for the same
        call; then the answer."""
        hosted = self._hosted
        call = make(wait)
        key = call.key
        answer = hosted.run.order.answer(key, call.content)
        with hosted.parked():
            while answer is None:
                wait = self._waits.get(key, wait)
                task = hosted.begin(make(wait))
                # Only now: a call that was refused must leave no wait for the one that may come later.
                self._waits[key] = wait
                task.add_done_callback(functools.partial(self._ended, key, wait))
                # Nothing may come between: the wait must find its caller when the task begins to run.
                async with aclosing(wait.follow(budget_s, task)) as events_of_wait:
                    async for event in events_of_wait:
                        yield event
                try:
                    answer = await hosted.result(task)
                except TurnoutError as error:
                    if error.reason != ABANDONED:
                        raise
                    # The caller before left, and its wait ended as this call came: begin anew.
                    await asyncio.sleep(0)
            await hosted.durable()
        yield answer

    def _ended(self, key: CallKey, wait: Wait, _: object) -> None:
        # Its successor under the same key must be found by those who stop it.
        if self._waits.get(key) is wait:
            del self._waits[key]

    # ---------------------------------------------------------------------------------------------------- lends

    async def complete_lend(self, lend: Lend, hybrid: Sync, standalone: Sync | None) -> Answered:
        """The weights of `lend` are installed: let its hybrids serve."""
        hosted, run = self._hosted, self._hosted.run
        served = await lending.finish(hosted, lend, hybrid.seconds)
        if standalone is not None:
            self._synced(standalone, False, lend.weight_version)
        self._synced(hybrid, True, lend.weight_version)
        metrics = {}
        if lend.counted and run.config.switching:
            metrics = {"timing_s/switch_to_rollout": served.cost_s}
        return Answered(CompletedLend(served.cost_s, metrics, served.failed))

    def _synced(self, sync: Sync, hybrid: bool, version: int) -> None:
        self._hosted.run.synced(sync, hybrid=hybrid, weight_version=version, moment=self._hosted.moment)

    async def abandon_lend(self, lend: Lend, reason: str) -> Answered:
        """The weights of `lend` could not be installed: undo it."""
        await lending.take_back(self._hosted, patient=True)
        self._hosted.run.abandoned(lend, reason, self._hosted.moment)
        return Answered(Nothing())

    async def begin_validation(self, call: Undertaking, step: int) -> Answered:
        """Make all GPUs available: lend the hybrids unless they serve."""
        hosted, run = self._hosted, self._hosted.run
        if not call.decided:
            if run.can_lend and not run.modes.lent and run.modes.hybrids:
                call.lend_id = hosted.tools.new_id()
            call.decided = True
        lend, failure = await self._lend(call, LendKind.VALIDATION, step)
        if failure is not None:
            raise failure
        run.record(events.ValidationBegan(step), hosted.moment)
        return Answered(Nothing()) if lend is None else Answered(lend, Ending.LEND, lend.lend_id)

    async def end_validation(self, step: int) -> Answered:
        """Leave the GPUs lent."""
        self._hosted.run.record(events.ValidationEnded(step), self._hosted.moment)
        return Answered(Nothing())
