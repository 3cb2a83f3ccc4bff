"""The loop that `fixed` and `verl` share: lend at a step's end, take back at a threshold.

Invariants: the threshold is fixed when a step begins and holds for that whole step, whatever the ratio does meanwhile;
a depth answers only for the step it was counted for (eviction depends on the step); a step ends once.
"""

from dataclasses import dataclass

from services.scheduler.policies.errors import EventOrderError
from services.scheduler.policies.off import OffPolicy
from services.scheduler.policies.threshold import switch_threshold
from services.scheduler.policies.types import (
    Action,
    Decision,
    DepthObserved,
    Event,
    Point,
    PolicyConfig,
    RunOpened,
    StarvationBegan,
    StarvationEnded,
    StepBegan,
    StepEnded,
)
from services.scheduler.policies.waits import StepWaits, WaitMeter


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that ended: its waits, whether it was idle, and the ratio that was in force."""

    step: int
    waits: StepWaits
    idle: bool
    ratio: float


@dataclass(frozen=True, slots=True)
class LendQuestion:
    """What is known when a step has ended: `sampleable` and `threshold` are those of the next step."""

    ended: EndedStep
    total_steps: int
    threshold: int
    sampleable: int

    @property
    def remaining(self) -> int:
        """Groups still missing to the next step's threshold."""
        return max(0, self.threshold - self.sampleable)

    def refusal(self) -> str | None:
        """Why no lend is possible, whatever it would cost; None when one is."""
        if self.ended.step >= self.total_steps:
            return f"Step {self.ended.step} is the last, so nothing is lent."
        if self.remaining == 0:
            return f"{self.sampleable} groups are sampleable, enough for the threshold of {self.threshold}."
        return None

    def numbers(self) -> dict[str, float]:
        """All of it, by name. `threshold_ratio` is the ratio before this step moved it, as verl reports it."""
        return {
            "step": float(self.ended.step),
            "total_training_steps": float(self.total_steps),
            "threshold_ratio": self.ended.ratio,
            "wait_seconds": self.ended.waits.wait_s,
            "wait_samples": float(self.ended.waits.missing),
            "idle": float(self.ended.idle),
            "threshold": float(self.threshold),
            "sampleable_count": float(self.sampleable),
            "remaining": float(self.remaining),
        }


class ThresholdLoop:
    """Follows a run's steps, depth and lent GPUs, and answers every point within a step."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.meter = WaitMeter()
        self._off = OffPolicy(config)
        self._depth: DepthObserved | None = None
        self._open_step: int | None = None
        self._threshold = 0
        self._ended: EndedStep | None = None

    def observe(self, event: Event, ratio: float) -> EndedStep | None:
        """Take note of an event while `ratio` is in force. Returns the step if this event ended it."""
        self._off.observe(event)
        match event:
            case RunOpened():
                self.config = event.config
            case DepthObserved():
                self._depth = event
            case StepBegan():
                run = self.config.run
                self._open_step = event.step
                self._threshold = switch_threshold(ratio, run.train_batch_size, run.mini_batch_size)
                self.meter.begin_step()
            case StarvationBegan() if event.step == self._open_step:
                self.meter.asked(self.config.run.mini_batch_size, event.sampleable)
            case StarvationEnded() if event.step == self._open_step:
                self.meter.waited(event.wait_s)
            case StepEnded() if event.step == self._open_step:
                waits = self.meter.end_step()
                self._open_step = None
                self._ended = EndedStep(event.step, waits, waits.wait_s > self.config.run.idle_tolerance_s, ratio)
                return self._ended
        return None

    def decide(self, point: Point, now: float) -> Decision | None:
        """The answer at `point`; None at a step's end with switching on, where the policies differ."""
        if not self.config.switch.enable_switch:
            return self._off.decide(point, now)
        if point is Point.STEP_END:
            return None
        if point is Point.SAMPLE_BEGIN:
            return Decision(action=Action.KEEP, reason="This policy lends only at a step's end.")
        return self._within_step(point)

    def lend_question(self, ratio: float) -> LendQuestion:
        """What the end of the last step is decided on, with `ratio` in force from the next step on."""
        if self._ended is None or self._open_step is not None:
            raise EventOrderError("no step has ended, so there is no step's end to decide")
        run = self.config.run
        return LendQuestion(
            ended=self._ended,
            total_steps=run.total_training_steps,
            threshold=switch_threshold(ratio, run.train_batch_size, run.mini_batch_size),
            sampleable=self._depth_at(self._ended.step + 1).sampleable,
        )

    def _within_step(self, point: Point) -> Decision:
        if self._open_step is None:
            raise EventOrderError(f"no step is open, so {point.value} cannot be decided")
        if not self._off.lent:
            return Decision(action=Action.KEEP, reason="The GPUs are with the trainer.", threshold=self._threshold)
        depth = self._depth_at(self._open_step)
        reachable = depth.sampleable + depth.in_flight + depth.unpaid_credits
        numbers = {
            "step": float(self._open_step),
            "threshold": float(self._threshold),
            "sampleable_count": float(depth.sampleable),
            "reachable_count": float(reachable),
        }
        have = f"{depth.sampleable} of {self._threshold} groups are sampleable"
        if depth.sampleable >= self._threshold:
            action, reason = Action.RECLAIM, f"{have}, so the GPUs go back to training."
        elif point is Point.WAITING and reachable < self._threshold:
            # At a step's begin its own prompts are yet to come, so only a wait can know that the supply falls short.
            action = Action.RECLAIM
            reason = f"{have} and at most {reachable} can be reached, so waiting longer is useless."
        else:
            action, reason = Action.KEEP, f"{have}, so the GPUs stay lent."
        return Decision(action=action, reason=reason, threshold=self._threshold, numbers=numbers)

    def _depth_at(self, step: int) -> DepthObserved:
        if self._depth is None or self._depth.step != step:
            raise EventOrderError(f"the depth of step {step} was not observed; the last one is {self._depth}")
        return self._depth
