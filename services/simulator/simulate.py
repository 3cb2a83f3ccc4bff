"""Simulates one run.

Invariant: workload, policy and seed determine the result; nothing else is read, neither clock nor disk.
"""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.policies import create
from services.simulator.draws import draw
from services.simulator.policy_decider import PolicyDecider
from services.simulator.result import Result, summarise
from services.simulator.run import SimulatedRun
from services.simulator.workload import Workload


def simulate(
    workload: Workload, policy_name: str, seed: int, *, progress: Callable[[int], None] | None = None
) -> Result:
    """Run `workload` with a policy. `progress` is told the steps done. Raises UnknownPolicyError."""
    policy = create(policy_name, workload.policy_config())
    run = SimulatedRun(workload, draw(workload, seed), PolicyDecider(policy, workload.progress_s))
    run.begin()
    while not run.done:
        run.step()
        if progress is not None:
            progress(run.steps_done)
    return summarise(workload.name, policy_name, seed, run.tally, run.now)
