"""What is simulated: a run's shape, its lengths, its engines, its costs, and what changes on the way.

Invariants: a workload that exists is valid and frozen; times are seconds, speeds tokens per second, lengths generated
tokens; an unknown key is an error that names it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from services.scheduler.policies.config import PolicyConfig, RunConfig, SwitchConfig

Share = Annotated[float, Field(ge=0, le=1)]
Spread = Annotated[float, Field(ge=0, le=3)]
NotNegative = Annotated[float, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Steady(_Part):
    """A factor that does not change."""

    kind: Literal["steady"] = "steady"


class Ramp(_Part):
    """A factor that goes from 1 at the first step to `to` at the last, by the same ratio every step."""

    kind: Literal["ramp"]
    to: PositiveFloat


class Jump(_Part):
    """A factor of 1 before step `at`, `to` from then on."""

    kind: Literal["jump"]
    at: PositiveInt
    to: PositiveFloat


class Wave(_Part):
    """A factor that swings between `low` and `high` with a period of `period` steps, as a square or as a sine."""

    kind: Literal["wave"]
    shape: Literal["square", "sine"]
    period: PositiveInt
    low: PositiveFloat
    high: PositiveFloat


Profile = Annotated[Steady | Ramp | Jump | Wave, Field(discriminator="kind")]
"""A factor as a function of the step."""


class Topology(_Part):
    """Replicas of both pools; `gpus_per_replica` matters to the policies' scaling factors alone."""

    hybrid_replicas: PositiveInt
    standalone_replicas: PositiveInt
    gpus_per_replica: PositiveInt = 4


class Batch(_Part):
    """Groups a step, trajectories a group, groups a mini-batch, and batches added before the first step.

    supply: prompts in all; the warm-up takes the first of them. None: every step has a batch of its own.
    """

    groups: PositiveInt = 64
    group_size: PositiveInt = 8
    mini_batch: PositiveInt = 16
    warmup_batches: NotNegative = 1.0
    supply: PositiveInt | None = None

    @model_validator(mode="after")
    def _whole_mini_batches(self) -> Self:
        if self.groups % self.mini_batch:
            raise ValueError(f"mini_batch {self.mini_batch} does not divide groups {self.groups}")
        return self


class Mode(_Part):
    """One lognormal of lengths: `mean` tokens before the cap, `log_std` of which the share `between` of the variance
    lies between prompts."""

    weight: PositiveFloat = 1.0
    mean: PositiveFloat
    log_std: Spread = 0.75
    between: Share = 0.85


class Lengths(_Part):
    """Response lengths. A group draws one of `modes`; `trend` multiplies the means by the step at which it is added."""

    modes: Annotated[tuple[Mode, ...], Field(min_length=1)]
    cap: PositiveInt
    trend: Profile = Steady()
    prompt_tokens: Annotated[int, Field(ge=0)] = 0


class Engine(_Part):
    """A replica decodes one token for each of its b requests in base_s + per_request_s x b seconds, times `speed`'s
    inverse; while it prefills, at `prefill_tokens_per_s`, it does not decode."""

    base_s: PositiveFloat = 0.00975
    per_request_s: NotNegative = 0.000078
    prefill_tokens_per_s: PositiveFloat = 60_000
    speed: Profile = Steady()


class Costs(_Part):
    """Seconds of a lend after the standalone sync, of a reclaim, of a standalone sync; `log_std` of their noise."""

    lend_s: NotNegative = 15.0
    reclaim_s: NotNegative = 5.0
    sync_s: NotNegative = 18.0
    log_std: Spread = 0.0


class Training(_Part):
    """Seconds of training a step, `log_std` of the noise of each mini-batch, and a factor by step."""

    step_s: PositiveFloat = 255.0
    log_std: Spread = 0.0
    trend: Profile = Steady()


class TopologyEvent(_Part):
    """From the beginning of step `at` there are so many replicas."""

    at: PositiveInt
    hybrid_replicas: PositiveInt
    standalone_replicas: PositiveInt


class Workload(_Part):
    """All of it.

    reinstall_within_step: the trainer can install the last published weights, so that a policy may lend within a step.
    progress_s: how often the policy hears of running requests while GPUs are lent.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    description: str
    steps: PositiveInt = 150
    topology: Topology
    batch: Batch = Batch()
    lengths: Lengths
    engine: Engine = Engine()
    costs: Costs = Costs()
    training: Training = Training()
    events: tuple[TopologyEvent, ...] = ()
    reinstall_within_step: bool = False
    progress_s: Annotated[float, Field(ge=0.01, le=60)] = 10.0

    @model_validator(mode="after")
    def _enough_prompts(self) -> Self:
        if self.events and list(self.events) != sorted(self.events, key=lambda event: event.at):
            raise ValueError("events are not in the order of their steps")
        if self.batch.supply is not None and self.batch.supply < self.steps * self.batch.groups:
            raise ValueError(f"batch.supply {self.batch.supply} is less than {self.steps} steps of {self.batch.groups}")
        return self

    def policy_config(self) -> PolicyConfig:
        """What a policy is told of this run. Switching is on, with verl's defaults."""
        topology, batch = self.topology, self.batch
        run = RunConfig(
            train_batch_size=batch.groups,
            mini_batch_size=batch.mini_batch,
            total_training_steps=self.steps,
            hybrid_gpus=topology.hybrid_replicas * topology.gpus_per_replica,
            standalone_gpus=topology.standalone_replicas * topology.gpus_per_replica,
            group_size=batch.group_size,
            max_response_length=self.lengths.cap,
            reinstall_within_step=self.reinstall_within_step,
        )
        return PolicyConfig(run=run, switch=SwitchConfig(enable_switch=True))
