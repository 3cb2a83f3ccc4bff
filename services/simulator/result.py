"""One simulated run in numbers.

Invariant: all is derived from the run's tally, so two results of one workload and seed differ by decisions alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.simulator.tally import StepTally, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """hours: wall clock of the run. trainer_idle_share: share of it in which the trainer waited for rollouts, GPUs lent
    or not; switches and syncs are not idle. lends: completed lends, without the one at the start. mean_staleness,
    mean_span: of the trajectories trained on, in weight versions.
    """

    workload: str
    policy: str
    seed: int
    hours: float
    trainer_idle_share: float
    lends: int
    mean_staleness: float
    mean_span: float
    steps: tuple[StepTally, ...] = field(repr=False)

    def as_row(self) -> dict[str, str | int | float]:
        """What `turnout simulate --json` prints."""
        return {
            "workload": self.workload,
            "policy": self.policy,
            "seed": self.seed,
            "hours": round(self.hours, 4),
            "trainer_idle_share": round(self.trainer_idle_share, 4),
            "lends": self.lends,
            "mean_staleness": round(self.mean_staleness, 4),
        }


def summarise(workload: str, policy: str, seed: int, tally: Tally, wall_s: float) -> Result:
    """The result of a run that took `wall_s` seconds."""
    trajectories = sum(step.trajectories for step in tally.steps)
    return Result(
        workload=workload,
        policy=policy,
        seed=seed,
        hours=wall_s / 3600,
        trainer_idle_share=sum(step.wait_s + step.lent_wait_s for step in tally.steps) / wall_s,
        lends=tally.lends,
        mean_staleness=sum(step.staleness for step in tally.steps) / trajectories,
        mean_span=sum(step.spans for step in tally.steps) / trajectories,
        steps=tuple(tally.steps),
    )
