"""The `fixed` policy: verl's loop with a ratio that never moves, lending whenever groups are missing.

Invariant: waits and costs change no answer; only the depth, the step and the configuration do.
"""

from services.scheduler.policies.loop import ThresholdLoop
from services.scheduler.policies.types import Action, Decision, Event, Point, PolicyConfig


class FixedPolicy:
    """Lends at a step's end if the next step's threshold is not met and a step follows."""

    name = "fixed"

    def __init__(self, config: PolicyConfig) -> None:
        self._loop = ThresholdLoop(config)

    @property
    def _ratio(self) -> float:
        return self._loop.config.switch.switch_threshold_ratio

    def observe(self, event: Event) -> None:
        self._loop.observe(event, self._ratio)

    def decide(self, point: Point, now: float) -> Decision:
        return self._loop.decide(point, now) or self._decide_step_end()

    def _decide_step_end(self) -> Decision:
        question = self._loop.lend_question(self._ratio)
        refusal = question.refusal()
        missing = f"{question.remaining} groups are missing to the threshold of {question.threshold}, so GPUs are lent."
        return Decision(
            action=Action.LEND if refusal is None else Action.KEEP,
            reason=refusal or missing,
            numbers=question.numbers() | {"should_switch_to_rollout": float(refusal is None)},
            threshold=question.threshold,
        )
