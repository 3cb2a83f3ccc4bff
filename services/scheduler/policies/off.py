"""The `off` policy: GPUs that were lent (at the run's start, for validation) come back, and none is lent.

Invariant: LEND is never answered, RECLAIM only while GPUs are lent.
"""

from services.scheduler.policies.types import Action, Decision, Event, LendDone, Point, PolicyConfig, ReclaimDone


class OffPolicy:
    """Never lends. Also what every other policy does while `enable_switch` is false."""

    name = "off"

    def __init__(self, config: PolicyConfig) -> None:
        del config  # Nothing in it changes what this policy does.
        self.lent = False
        """Whether hybrid GPUs generate."""

    def observe(self, event: Event) -> None:
        match event:
            case LendDone():
                self.lent = True
            case ReclaimDone():
                self.lent = False

    def decide(self, point: Point, now: float) -> Decision:
        if self.lent and point in (Point.STEP_BEGIN, Point.WAITING):
            return Decision(action=Action.RECLAIM, reason="Switching is off, so the lent GPUs go back to training.")
        return Decision(action=Action.KEEP, reason="Switching is off.")
