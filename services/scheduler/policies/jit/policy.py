"""The `jit` policy: lend when the next step is predicted to end sooner for it, take the GPUs back when lending longer
would not end the step sooner.

Invariants: a prediction rests on the last reading of running requests and on what happened until then; below 95 %
coverage `verl` decides, and the answer says so; what was predicted is compared with what came when the step ends, and
corrects the next predictions; deciding changes nothing but a memo.
"""

from services.scheduler.policies.errors import EventOrderError
from services.scheduler.policies.jit.forecast import Options, options
from services.scheduler.policies.jit.guard import Guard
from services.scheduler.policies.jit.knowledge import Knowledge
from services.scheduler.policies.jit.replay import Replay
from services.scheduler.policies.off import OffPolicy
from services.scheduler.policies.types import (
    Action,
    Decision,
    DepthObserved,
    Event,
    GroupFinished,
    LendDone,
    MiniBatchBegan,
    MiniBatchEnded,
    Point,
    PolicyConfig,
    ReclaimDone,
    RunOpened,
    StarvationEnded,
    StepBegan,
    StepEnded,
    SyncDone,
)
from services.scheduler.policies.verl import VerlPolicy

# A plan is looked at again at least this often: readings of running requests come about as often.
_RECHECK_S = 10.0
# A reclaim planned sooner than this is due: nothing is learned in between.
_DUE_S = 1.0


class JitPolicy:
    """Composed of what it knows, and of two judges of what it predicted."""

    name = "jit"
    reads_progress = True
    """Readings of running requests change what it answers."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._off = OffPolicy(config)
        self._verl = VerlPolicy(config)
        self._known = Knowledge(config)
        self._guard = Guard()
        self._replay: Replay | None = None
        self._step: int | None = None
        self._ended: int | None = None
        self._ended_at = 0.0
        self._unpredicted = False
        self._mini_batch_at = 0.0
        self._mini_batches_done = 0

    # ------------------------------------------------------------------------------------------------- events

    def observe(self, event: Event) -> None:
        # Predictions to learn from are made of what was known just before the event that follows a decision.
        if self._unpredicted and isinstance(event, SyncDone | LendDone | StepBegan):
            self._unpredicted = False
            self._predict_step()
        if isinstance(event, ReclaimDone):
            self._predict_wait(event.at - event.cost_s)
        self._verl.observe(event)
        self._off.observe(event)
        self._known.observe(event)
        hindsight = self._known.hindsight
        match event:
            case RunOpened():
                self._config = event.config
                if not event.goes_on:
                    # Of a step that was cut nothing can be learned.
                    self._unpredicted, self._replay = False, None
                    self._guard.forget_step()
                    hindsight.forget_step()
            case StepBegan():
                self._step = event.step
                self._mini_batches_done = 0
            case StarvationEnded():
                hindsight.waited(event.wait_s)
            case MiniBatchBegan():
                self._mini_batches_done = event.mini_batch + 1
                self._mini_batch_at = event.at
            case MiniBatchEnded():
                self._guard.trained(event.at - self._mini_batch_at)
            case LendDone():
                self._guard.lent()
            case GroupFinished(failed=False) if self._replay is not None:
                self._replay.finished(event.group, event.lengths)
            case StepEnded():
                self._step, self._ended, self._ended_at = None, event.step, event.at
                self._unpredicted = True
                hindsight.step_ended()
                if self._replay is not None:
                    both = self._replay.options()
                    self._guard.step_ended(event.at, both.alone.end_s, both.lent.foreseen_s)
                    self._replay = None

    def _predict_step(self) -> None:
        """Remember what is expected of the next step, to learn from it when it ends."""
        depth = self._known.depth
        if self._known.ready and depth is not None and self._ended is not None and depth.step == self._ended + 1:
            self._replay = self._next_step(depth)
            both = self._replay.predicted
            self._guard.predicted(self._ended_at, both.alone.end_s, both.lent.foreseen_s, self._known.train_s)

    def _predict_wait(self, reclaimed_at: float) -> None:
        """Remember what the step is expected to wait after a reclaim, to learn from it when it ends."""
        known = self._known
        if self._step is None or not known.ready or not len(known.groups):
            return
        forecast = known.forecast(0)
        x0 = forecast.outlook.tokens_after(known.since_reading(reclaimed_at), lent=True)
        left = self._left
        needed = forecast.outlook.needed(forecast.alive(known.groups), known.sampleable, left, x0)
        now = forecast.outlook.flow.lent(needed, 0.0, 0.0, x0, longest=0.0)
        known.hindsight.predicted(now.wait_s, left * (known.rhythm.mini_batch_s or 0.0))

    # ---------------------------------------------------------------------------------------------- decisions

    def decide(self, point: Point, now: float) -> Decision:
        if not self._config.switch.enable_switch:
            return self._off.decide(point, now)
        if self._known.blind:
            return self._fall_back(point, now)
        if point is Point.STEP_END:
            return self._step_end(now)
        if point is Point.SAMPLE_BEGIN:
            return self._sample_begin(now)
        return self._within_step(point, now)

    def _fall_back(self, point: Point, now: float) -> Decision:
        decision = self._verl.decide(point, now)
        share = self._known.groups.coverage
        seen = f"Only {share:.0%} of the running requests are" if share > 0 else "None of the running requests is"
        return Decision(
            action=decision.action,
            reason=f"{seen} visible, so verl decides: {decision.reason}",
            predicted_wait_s=decision.predicted_wait_s,
            numbers={**decision.numbers, "covered_share": share},
            threshold=decision.threshold,
        )

    # ----------------------------------------------------------------------------------- while GPUs are lent

    def _within_step(self, point: Point, now: float) -> Decision:
        if self._step is None:
            raise EventOrderError(f"no step is open, so {point.value} cannot be decided")
        if not self._off.lent:
            return Decision(action=Action.KEEP, reason="The GPUs are with the trainer.")
        depth, run = self._depth_at(self._step), self._known.run
        # At a step's begin its own prompts are yet to come.
        coming = run.train_batch_size if point is Point.STEP_BEGIN else 0
        more = depth.in_flight + depth.unpaid_credits + coming
        numbers = {"sampleable_count": float(depth.sampleable), "reachable_count": float(depth.sampleable + more)}
        have = f"{depth.sampleable} groups are sampleable"
        if depth.in_flight + coming == 0 or depth.sampleable + more < run.mini_batch_size:
            reason = f"{have} and no more can come, so the GPUs go back to training."
            return Decision(action=Action.RECLAIM, reason=reason, numbers=numbers)
        if depth.sampleable < run.mini_batch_size:
            reason = f"{have}, less than a mini-batch, so the GPUs stay lent."
            return Decision(action=Action.KEEP, reason=reason, numbers=numbers, recheck_at=now + _RECHECK_S)
        if not self._known.ready:
            half = max(run.train_batch_size // 2, run.mini_batch_size)
            action = Action.RECLAIM if depth.sampleable >= half else Action.KEEP
            reason = f"{have}, and until lengths are known the GPUs come back at {half}."
            return Decision(action=action, reason=reason, numbers=numbers, threshold=half)
        return self._weigh_reclaim(depth, coming, numbers, now)

    def _weigh_reclaim(self, depth: DepthObserved, coming: int, numbers: dict[str, float], now: float) -> Decision:
        known = self._known
        forecast = known.forecast(coming)
        x0 = forecast.outlook.tokens_after(known.since_reading(now), lent=True)
        needed = forecast.outlook.needed(forecast.alive(known.groups), depth.sampleable, self._left, x0)
        best = forecast.outlook.flow.lent(needed, 0.0, 0.0, x0)
        wait_s, lend_s = max(best.wait_s, 0.0), best.reclaim_in_s
        numbers = {
            **numbers,
            "predicted_wait_seconds": wait_s,
            "reclaim_in_seconds": lend_s,
            "in_flight": float(depth.in_flight),
            **known.numbers(now),
        }
        missing = max(self._left * known.run.mini_batch_size - depth.sampleable, 0)
        if lend_s < _DUE_S:
            rest = (
                f"the remaining {missing} should keep the trainer waiting {wait_s:.0f} s" if missing else "all there is"
            )
            reason = (
                f"Reclaimed at {depth.sampleable} groups: {rest}, and lending longer would not end the step sooner."
            )
            return Decision(action=Action.RECLAIM, reason=reason, predicted_wait_s=wait_s, numbers=numbers)
        return Decision(
            action=Action.KEEP,
            reason=f"{depth.sampleable} groups are sampleable; {lend_s:.0f} s more of lending end the step sooner.",
            predicted_wait_s=wait_s,
            numbers=numbers,
            recheck_at=now + min(lend_s, _RECHECK_S),
        )

    # ----------------------------------------------------------------------------------------- at a step's end

    def _step_end(self, now: float) -> Decision:
        if self._ended is None or self._step is not None:
            raise EventOrderError("no step has ended, so there is no step's end to decide")
        depth, run = self._depth_at(self._ended + 1), self._known.run
        numbers = {"sampleable_count": float(depth.sampleable)}
        have = f"{depth.sampleable} groups are sampleable"
        if self._ended >= run.total_training_steps:
            return _at_end(False, f"Step {self._ended} is the last, so nothing is lent.", numbers)
        if not self._known.ready:
            lend = depth.sampleable < run.train_batch_size
            return _at_end(
                lend,
                f"{have} and lengths are not known yet, so a lend is {'tried' if lend else 'not needed'}.",
                numbers,
            )
        both = self._next_step(depth).predicted
        alone_s, lent_s = max(both.alone.wait_s, 0.0), max(both.lent.wait_s, 0.0)
        gain_s = both.gain_s + self._guard.correction_s
        numbers |= {
            "gain_seconds": gain_s,
            "gain_correction_seconds": self._guard.correction_s,
            "gain_margin_seconds": self._guard.margin_s,
            "wait_alone_seconds": alone_s,
            "wait_lent_seconds": lent_s,
            "lend_for_seconds": both.lent.reclaim_in_s,
        } | self._known.numbers(now)
        # Without a wait nothing can be gained, whatever a correction says.
        lend = gain_s > self._guard.margin_s and alone_s > 0
        would = f"The next step would wait {alone_s:.0f} s for rollouts"
        if not lend:
            return _at_end(False, f"{would}, and lending would not end it sooner.", numbers, wait_s=alone_s)
        reason = f"{would}; lending for about {both.lent.reclaim_in_s:.0f} s ends it {gain_s:.0f} s sooner."
        return _at_end(True, reason, numbers, both, lent_s)

    def _next_step(self, depth: DepthObserved) -> Replay:
        """The next step without and with a lend, when one has just ended."""
        known = self._known
        forecast = known.forecast(known.run.train_batch_size)
        x0 = forecast.outlook.tokens_after(known.since_reading(self._ended_at), lent=False)
        alive = forecast.alive(known.groups)
        steps, setting, sync_s = known.run.parameter_sync_step, known.setting(), known.rhythm.sync_s
        needed = forecast.outlook.needed(alive, depth.sampleable, steps, x0)
        return Replay(
            forecast=forecast,
            setting=setting,
            predicted=options(forecast, needed, setting, sync_s, x0),
            sampleable=depth.sampleable,
            mini_batches=steps,
            sync_s=sync_s,
            x0=x0,
            alive=frozenset(name for name in forecast.flight.names if known.groups.has(name)),
        )

    # ------------------------------------------------------------------------------------------ within a step

    def _sample_begin(self, now: float) -> Decision:
        known = self._known
        run, have = known.run, f"{known.sampleable} groups are sampleable"
        if not run.reinstall_within_step:
            return Decision(action=Action.KEEP, reason="The trainer cannot install weights within a step.")
        if self._off.lent or known.sampleable >= run.mini_batch_size:
            return Decision(action=Action.KEEP, reason=f"{have}, so there is nothing to lend for.")
        if not known.ready or not len(known.groups):
            return Decision(action=Action.KEEP, reason=f"{have}, and what runs is not known, so nothing is lent.")
        forecast = known.forecast(0)
        x0 = forecast.outlook.tokens_after(known.since_reading(now), lent=False)
        needed = forecast.outlook.needed(forecast.alive(known.groups), known.sampleable, self._left, x0)
        both = options(forecast, needed, known.setting(), 0.0, x0)
        alone_s, lend = max(both.alone.wait_s, 0.0), both.gain_s > 0
        numbers = {
            "sampleable_count": float(known.sampleable),
            "gain_seconds": both.gain_s,
            "wait_alone_seconds": alone_s,
            "wait_lent_seconds": both.lent.wait_s,
            "lend_for_seconds": both.lent.reclaim_in_s,
        } | known.numbers(now)
        starving = f"{have} and the trainer would wait {alone_s:.0f} s in this step"
        then = f"lending ends it {both.gain_s:.0f} s sooner" if lend else "lending would not end it sooner"
        return Decision(
            action=Action.LEND if lend else Action.KEEP,
            reason=f"{starving}; {then}.",
            placement=both.placement if lend else None,
            predicted_wait_s=max(both.lent.wait_s, 0.0) if lend else alone_s,
            numbers=numbers,
        )

    # ------------------------------------------------------------------------------------------------ details

    @property
    def _left(self) -> int:
        """Mini-batches that the step has still to train."""
        return self._known.run.parameter_sync_step - self._mini_batches_done

    def _depth_at(self, step: int) -> DepthObserved:
        depth = self._known.depth
        if depth is None or depth.step != step:
            raise EventOrderError(f"the depth of step {step} was not observed; the last one is {depth}")
        return depth


def _at_end(
    lend: bool, reason: str, numbers: dict[str, float], both: Options | None = None, wait_s: float | None = None
) -> Decision:
    return Decision(
        action=Action.LEND if lend else Action.KEEP,
        reason=reason,
        placement=both.placement if both else None,
        predicted_wait_s=wait_s,
        numbers=numbers | {"should_switch_to_rollout": float(lend)},
    )
