"""The `verl` policy: lend when the waiting it should save is worth more than the two switches it costs.

Invariants: the ratio moves when a step ends, never when a decision is asked for, so a repeated question moves nothing;
the scaling factor rests on the configured GPUs, as in verl, so a lost replica does not change it.

Source: verl 0.9.1, trainer_separate_async.py.
"""

from services.scheduler.policies.costs import SwitchCosts
from services.scheduler.policies.gain import benefit_seconds, pays, scaling_factor
from services.scheduler.policies.loop import ThresholdLoop
from services.scheduler.policies.ratio import AdaptiveRatio
from services.scheduler.policies.types import (
    Action,
    Decision,
    Event,
    LendDone,
    Point,
    PolicyConfig,
    ReclaimDone,
    RunOpened,
)


class VerlPolicy:
    """verl's decisions, composed of threshold loop, adaptive ratio, cost windows and gain."""

    name = "verl"

    def __init__(self, config: PolicyConfig) -> None:
        self._loop = ThresholdLoop(config)
        self._ratio = AdaptiveRatio(config)
        self._costs = SwitchCosts(config.switch.switch_cost_window_size)

    def observe(self, event: Event) -> None:
        match event:
            case RunOpened():
                self._ratio.adopt(event.config)
                self._costs.resize(event.config.switch.switch_cost_window_size)
            case LendDone(counted=True):
                self._costs.lend.add(event.cost_s, event.at)
            case ReclaimDone(counted=True):
                self._costs.reclaim.add(event.cost_s, event.at)
        ended = self._loop.observe(event, self._ratio.value)
        if ended is not None:
            self._ratio.step_ended(ended.idle)

    def decide(self, point: Point, now: float) -> Decision:
        return self._loop.decide(point, now) or self._decide_step_end(now)

    def _decide_step_end(self, now: float) -> Decision:
        question = self._loop.lend_question(self._ratio.value)
        run = self._loop.config.run
        scaling = scaling_factor(run.hybrid_gpus, run.standalone_gpus)
        per_group = self._loop.meter.seconds_per_group()
        cost = self._costs.round_trip()
        benefit = None if per_group is None else benefit_seconds(question.remaining, per_group, scaling)

        refusal = question.refusal()
        lend = refusal is None and pays(benefit, cost)
        numbers = question.numbers() | self._costs.numbers(now)
        numbers["scaling_factor"] = scaling
        numbers["should_switch_to_rollout"] = float(lend)
        wait_s = None
        if per_group is not None and benefit is not None:
            numbers["per_sample_time_seconds"] = per_group
            numbers["benefit_seconds"] = benefit
            wait_s = question.remaining * per_group - (benefit if lend else 0.0)
        if cost is not None:
            numbers["effective_switch_cost_seconds"] = cost
        return Decision(
            action=Action.LEND if lend else Action.KEEP,
            reason=refusal or _weigh(question.remaining, benefit, cost),
            predicted_wait_s=wait_s,
            numbers=numbers,
            threshold=question.threshold,
        )


def _weigh(remaining: int, benefit: float | None, cost: float | None) -> str:
    """One sentence on a lend that is possible."""
    missing = f"{remaining} groups are missing"
    if benefit is None:
        return f"{missing} and no wait was measured yet, so a lend is tried."
    if cost is None:
        return f"{missing} and the cost of a round trip was not measured yet, so a lend is tried."
    if pays(benefit, cost):
        return f"{missing}: lending saves {benefit:.1f} s and costs {cost:.1f} s."
    return f"{missing}: lending would save {benefit:.1f} s, not more than the {cost:.1f} s it costs."
