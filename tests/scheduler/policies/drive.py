"""Drives a policy through steps as the scheduler does, keeping every event for a replay."""

from services.scheduler.policies import create
from services.scheduler.policies.base import Policy
from services.scheduler.policies.types import (
    Decision,
    DepthObserved,
    Event,
    LendDone,
    Point,
    PolicyConfig,
    ReclaimDone,
    RunConfig,
    StarvationBegan,
    StarvationEnded,
    StepBegan,
    StepEnded,
    SwitchConfig,
)

# The published setting: 16 hybrid and 8 standalone GPUs, so lending triples the speed (scaling 3).
RUN = RunConfig(
    train_batch_size=64, mini_batch_size=16, total_training_steps=150, hybrid_gpus=16, standalone_gpus=8, group_size=8
)


def configured(run: RunConfig = RUN, *, enable_switch: bool = True, **switch: float) -> PolicyConfig:
    """A configuration with switching on and verl's defaults, but for what is given."""
    return PolicyConfig(run=run, switch=SwitchConfig(enable_switch=enable_switch, **switch))  # type: ignore[arg-type]


class Drive:
    """One policy, its clock (one second per event) and all events it saw."""

    def __init__(self, name: str, config: PolicyConfig) -> None:
        self.config = config
        self.policy: Policy = create(name, config)
        self.events: list[Event] = []
        self.now = 0.0

    def feed(self, event: Event) -> None:
        self.events.append(event)
        self.policy.observe(event)

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def lend_done(self, cost_s: float = 15.0, *, counted: bool = True) -> None:
        self.feed(LendDone(at=self._tick(), cost_s=cost_s, counted=counted))

    def reclaim_done(self, cost_s: float = 5.0, *, counted: bool = True) -> None:
        self.feed(ReclaimDone(at=self._tick(), cost_s=cost_s, counted=counted))

    def depth(self, step: int, sampleable: int, in_flight: int = 1000, unpaid_credits: int = 0) -> None:
        self.feed(
            DepthObserved(
                at=self._tick(), step=step, sampleable=sampleable, in_flight=in_flight, unpaid_credits=unpaid_credits
            )
        )

    def begin(self, step: int) -> None:
        self.feed(StepBegan(at=self._tick(), step=step))

    def ask(self, step: int, mini_batch: int, sampleable: int) -> None:
        self.feed(StarvationBegan(at=self._tick(), step=step, mini_batch=mini_batch, sampleable=sampleable))

    def got(self, step: int, mini_batch: int, wait_s: float) -> None:
        self.feed(StarvationEnded(at=self._tick(), step=step, mini_batch=mini_batch, wait_s=wait_s))

    def sample(self, step: int, mini_batch: int, sampleable: int, wait_s: float) -> None:
        self.ask(step, mini_batch, sampleable)
        self.got(step, mini_batch, wait_s)

    def end(self, step: int, sampleable: int = 0) -> Decision:
        """End `step` with `sampleable` groups for the next one; the decision."""
        self.feed(StepEnded(at=self._tick(), step=step))
        self.depth(step + 1, sampleable)
        return self.decide(Point.STEP_END)

    def step(self, step: int, *, wait_s: float = 0.0, missing: int = 0, sampleable: int = 0) -> Decision:
        """A whole step whose first mini-batch was `missing` groups short and came after `wait_s`."""
        self.begin(step)
        self.sample(step, 0, self.config.run.mini_batch_size - missing, wait_s)
        return self.end(step, sampleable)

    def decide(self, point: Point) -> Decision:
        return self.policy.decide(point, self.now)
