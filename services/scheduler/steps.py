"""What each of a trainer's calls does, beyond its place in the order.

Invariants: the depth is read before anything is noted, so that a buffer that does not answer leaves no half-noted step;
the policy decides, and this carries it out; a lend that does not come about lets the trainer proceed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from services.runtime.errors import TurnoutError
from services.scheduler import lending
from services.scheduler.domain import events
from services.scheduler.domain.calls import CallKey, Ending
from services.scheduler.domain.events import LendKind, Mode
from services.scheduler.domain.lends import Lend
from services.scheduler.hosted import Answered, HostedRun
from services.scheduler.policies import decision_metrics
from services.scheduler.policies.types import Action, Decision, Point
from services.scheduler.waiting import ABANDONED, EXHAUSTED, HELD, REACHED, TIMED_OUT, Event, Outcome, Wait, WaitEnd
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

    def _stop_waits(self, error: Exception) -> None:
        for wait in self._waits.values():
            wait.stop(error)

    # --------------------------------------------------------------------------------------------------- steps

    async def begin_step(self, step: int, standalone_update_s: float | None) -> Answered:
        """Open `step`, and reclaim if the policy says so."""
        hosted, run = self._hosted, self._hosted.run
        asks = run.modes.lent and run.next_config.switching
        depth = await hosted.buffer.depth(step) if asks else None
        if standalone_update_s is not None and not run.announced(step):
            self._synced(False, standalone_update_s, step - 1)
        run.begin_step(step, hosted.moment)
        decision = None
        reclaimed = False
        if run.modes.lent:
            if depth is not None:
                run.observe_depth(depth, hosted.moment)
            decision = run.decide(Point.STEP_BEGIN, step, hosted.moment)
            if decision.action is Action.RECLAIM:
                await lending.take_back(hosted)
                reclaimed = True
        else:
            reclaimed = await lending.ensure_trainer(hosted) is not None
        return Answered(BeganStep(run.mode, reclaimed, decision))

    async def prepare_step(
        self, key: CallKey, content: bytes, cursor: int, budget_s: float
    ) -> AsyncGenerator[Event | Prepared, None]:
        """Wait with the GPUs lent until the policy takes them back; at once if they are not lent."""

        async def work(wait: Wait) -> Answered:
            hosted, run = self._hosted, self._hosted.run
            if not run.modes.lent:
                reclaimed = await lending.ensure_trainer(hosted) is not None
                prepared = Prepared(REACHED, run.mode, reclaimed, None, cursor, run.timings.metrics())
                return Answered(prepared)
            end = await wait.run()
            run.timings.waited(end.waited_s)
            if end.outcome in (TIMED_OUT, HELD):
                return Answered(self._prepared(end, reclaimed=False), Ending.TIMED_OUT)
            await lending.take_back(hosted)
            ending = Ending.EXHAUSTED if end.outcome == EXHAUSTED else Ending.DONE
            return Answered(self._prepared(end, reclaimed=True), ending)

        target = self._target(self._hosted.run.config.train_batch_size)
        wait = Wait(self._hosted, key.step, target, cursor)
        async with aclosing(self._waiting(key, content, wait, budget_s, work)) as heard:
            async for event in heard:
                yield cast("Event | Prepared", event)

    def _prepared(self, end: WaitEnd, *, reclaimed: bool) -> Prepared:
        run = self._hosted.run
        metrics = run.timings.metrics()
        if not reclaimed:
            metrics.pop("timing_s/switch_to_trainer", None)
        metrics.update(end.done.evictions.metrics)
        return Prepared(
            end.outcome, run.mode, reclaimed, end.done, end.done.next_cursor, metrics, end.decision, end.reason
        )

    async def end_step(self, step: int) -> Answered:
        """Close `step`, and lend if the policy says so."""
        hosted, run = self._hosted, self._hosted.run
        depth = await hosted.buffer.depth(step + 1) if run.config.switching else None
        run.record(events.StepEnded(step), hosted.moment)
        if depth is not None:
            run.observe_depth(depth, hosted.moment)
        decision = run.decide(Point.STEP_END, step, hosted.moment)
        metrics: dict[str, float] = {}
        if run.config.switching:
            metrics = {**decision_metrics(decision), **run.timings.metrics()}
            run.record(events.StepMetrics(step, metrics), hosted.moment)
        lend, failure = None, ""
        if decision.action is Action.LEND:
            lend, failure = await self._lend(LendKind.STEP_END, step)
        ended = EndedStep(lend, decision, metrics, failure)
        return Answered(ended, Ending.LEND, lend.lend_id) if lend else Answered(ended)

    async def _lend(self, kind: LendKind, weight_version: int) -> tuple[Lend | None, str]:
        """A lend that began, or why it did not."""
        lend = Lend(self._hosted.tools.new_id(), kind, weight_version, self._hosted.run.resumed)
        try:
            await lending.begin(self._hosted, lend, keep_sessions=kind is LendKind.VALIDATION)
        except TurnoutError as error:
            return None, error.message
        return lend, ""

    # ---------------------------------------------------------------------------------------------- mini-batches

    async def begin_sample(
        self, key: CallKey, content: bytes, cursor: int, budget_s: float
    ) -> AsyncGenerator[Event | Sampled, None]:
        """Announce a mini-batch: proceed, lend, or (after a lend) wait until the policy takes the GPUs back."""

        async def work(wait: Wait) -> Answered:
            if key.attempt == 0:
                return await self._first_sample(key, cursor)
            if not self._hosted.run.modes.lent:
                return await self._proceed(key.step, cursor)
            return await self._wait_in_step(key, wait)

        config = self._hosted.run.config
        rest = config.train_batch_size - key.mini_batch * config.mini_batch_size
        target = self._target(max(1, rest))
        wait = Wait(self._hosted, key.step, target, cursor)
        async with aclosing(self._waiting(key, content, wait, budget_s, work)) as heard:
            async for event in heard:
                yield cast("Event | Sampled", event)

    async def _first_sample(self, key: CallKey, cursor: int) -> Answered:
        hosted, run = self._hosted, self._hosted.run
        depth = await hosted.buffer.depth(key.step)
        run.begin_sample(key.mini_batch, depth, hosted.moment)
        decision = run.decide(Point.SAMPLE_BEGIN, key.step, hosted.moment)
        if decision.action is Action.LEND and run.config.can_reinstall and run.mode is Mode.TRAINER:
            lend, _ = await self._lend(LendKind.WITHIN_STEP, key.step - 1)
            if lend is not None:
                return Answered(Sampled(cursor, lend=lend, decision=decision), Ending.LEND, lend.lend_id)
        if run.modes.in_between:
            # A lend could neither begin nor be undone: PROCEED would let two use the same memory. (A replica that fell
            # ill since the step began is no such thing, and waits for the next step.)
            await lending.ensure_trainer(hosted)
        return Answered(Sampled(cursor, depth.sampleable, decision=decision))

    async def _proceed(self, step: int, cursor: int) -> Answered:
        await lending.ensure_trainer(self._hosted)
        return Answered(Sampled(cursor, (await self._hosted.buffer.depth(step)).sampleable))

    async def _wait_in_step(self, key: CallKey, wait: Wait) -> Answered:
        end = await wait.run()
        cursor = end.done.next_cursor
        if end.outcome in (TIMED_OUT, HELD):
            timed_out = end.reason or "the time to wait has passed with the GPUs lent"
            sampled = Sampled(cursor, timed_out=timed_out, done=end.done, decision=end.decision)
            return Answered(sampled, Ending.TIMED_OUT)
        reclaim_s = await lending.take_back(self._hosted)
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

    async def end_sample(self, key: CallKey, wait_s: float, tokens: int | None) -> Answered:
        """Note how long the trainer waited for its mini-batch."""
        self._hosted.run.end_sample(key.step, key.mini_batch, wait_s, tokens, self._hosted.moment)
        return Answered(Nothing())

    # ---------------------------------------------------------------------------------------------------- waits

    def _target(self, without_threshold: int) -> int:
        """Groups to wait for: the policy's threshold, else as many as there is use for."""
        threshold = self._hosted.run.threshold
        return without_threshold if threshold is None else threshold

    async def _waiting(
        self,
        key: CallKey,
        content: bytes,
        wait: Wait,
        budget_s: float,
        work: Callable[[Wait], Awaitable[Answered]],
    ) -> AsyncGenerator[Event | object, None]:
        """The events of the wait that `work` does for `key`, or of the one under way, then its answer."""
        hosted = self._hosted
        answer = hosted.run.order.answer(key, content)
        with hosted.parked():
            while answer is None:
                wait = self._waits.get(key, wait)
                task = hosted.begin(key, content, functools.partial(work, wait))
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
        yield answer

    def _ended(self, key: CallKey, wait: Wait, _: object) -> None:
        # Its successor under the same key must be found by those who stop it.
        if self._waits.get(key) is wait:
            del self._waits[key]

    # ---------------------------------------------------------------------------------------------------- lends

    async def complete_lend(self, lend: Lend, hybrid_update_s: float, standalone_update_s: float | None) -> Answered:
        """The weights of `lend` are installed: let its hybrids serve."""
        hosted, run = self._hosted, self._hosted.run
        served = await lending.finish(hosted, lend, hybrid_update_s)
        if standalone_update_s is not None:
            self._synced(False, standalone_update_s, lend.weight_version)
        self._synced(True, hybrid_update_s, lend.weight_version)
        metrics = {}
        if lend.counted and run.config.switching:
            metrics = {"timing_s/switch_to_rollout": served.cost_s}
        return Answered(CompletedLend(served.cost_s, metrics, served.failed))

    def _synced(self, hybrid: bool, update_s: float, version: int) -> None:
        self._hosted.run.synced(hybrid=hybrid, seconds=update_s, weight_version=version, moment=self._hosted.moment)

    async def abandon_lend(self, lend: Lend, reason: str) -> Answered:
        """The weights of `lend` could not be installed: undo it."""
        await lending.take_back(self._hosted)
        self._hosted.run.abandoned(lend, reason, self._hosted.moment)
        return Answered(Nothing())

    async def begin_validation(self, step: int) -> Answered:
        """Make all GPUs available: lend the hybrids unless they serve."""
        hosted, run = self._hosted, self._hosted.run
        lend = None
        if run.can_lend and not run.modes.lent and run.modes.hybrids:
            lend = Lend(hosted.tools.new_id(), LendKind.VALIDATION, step, run.resumed)
            await lending.begin(hosted, lend, keep_sessions=True)
        run.record(events.ValidationBegan(step), hosted.moment)
        return Answered(Nothing()) if lend is None else Answered(lend, Ending.LEND, lend.lend_id)

    async def end_validation(self, step: int) -> Answered:
        """Leave the GPUs lent."""
        self._hosted.run.record(events.ValidationEnded(step), self._hosted.moment)
        return Answered(Nothing())
