"""The best schedule that a search with full knowledge finds: the upper reference of `turnout simulate --oracle`.

What it is: a beam search over whole runs. It knows every length, training time, cost and topology change to come. Step
by step it branches each kept run into: not lending, and lending with a reclaim at each of a grid of depths (quarters of
a mini-batch, from one mini-batch to a batch and a half). It keeps the runs with the least time so far plus the time
that all replicas together would need for what is still to decode, half of them judged with a quarter of that. The
fastest run at the end is the oracle.

What it is not: a proven optimum. Reclaims between the depths of the grid, lends within a step and other placements than
the one below are not tried. A policy may beat it by a little.

Invariant: not lending at all is always among the runs kept, so the oracle is never slower than `off`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.policies.types import Action, Decision, Event, Placement, Point, RequestKey
from services.simulator.draws import draw
from services.simulator.result import Result, summarise
from services.simulator.run import SimulatedRun
from services.simulator.workload import Workload

# On the calibrated workload 2 reach 15.9 %, 3 and 6 reach 16.1 %, 12 the same, at four times the time.
BEAM = 3


@dataclass(frozen=True, slots=True)
class Script:
    """A decider that follows orders: lend at the step's end or not, take back at `depth` groups."""

    lend: bool
    depth: int
    ticks_s: float | None = None

    def tell(self, event: Event) -> None:
        """Orders do not depend on events."""

    def tick(self, run: SimulatedRun) -> None:
        """Orders do not depend on readings."""

    def decide(self, point: Point, run: SimulatedRun) -> Decision:
        """Follow the orders."""
        if point is Point.STEP_END:
            if self.lend:
                return Decision(action=Action.LEND, reason="Ordered.", placement=longest_stay(run))
            return Decision(action=Action.KEEP, reason="Ordered.")
        back = point is not Point.SAMPLE_BEGIN and len(run.groups.ready) >= self.depth
        return Decision(action=Action.RECLAIM if back else Action.KEEP, reason="Ordered.")


def longest_stay(run: SimulatedRun) -> Placement:
    """Requests with most left to decode stay, as many as make all replicas equally full with the next batch."""
    left = [(end - replica.progress, request) for replica in run.fleet.standalones for end, request in replica.ends]
    left.sort(reverse=True)
    coming = run.workload.batch.groups * run.workload.batch.group_size
    share = (len(left) + coming) * len(run.fleet.standalones) // len(run.fleet.all)
    keys = [RequestKey(f"g{r // run.workload.batch.group_size}", r % run.workload.batch.group_size) for _, r in left]
    return Placement(hybrid=tuple(keys[share:]), standalone=tuple(keys[:share]))


def oracle(workload: Workload, seed: int, *, beam: int = BEAM, progress: Callable[[int], None] | None = None) -> Result:
    """The oracle's run of `workload`. `progress` is told the steps done."""
    depths = _depths(workload)
    token_s = _token_s(workload)
    start = SimulatedRun(workload, draw(workload, seed), Script(False, workload.batch.mini_batch))
    start.begin()
    off = start.copy(Script(False, 0))
    off.train()
    kept = [off, *_trained(start, depths)]
    for step in range(1, workload.steps):
        branches = [branch for run in kept for branch in _branches(run, depths)]
        off = off.copy(Script(False, 0))
        off.end()
        off.train()
        kept = [off, *_best(branches, beam, token_s)]
        if progress is not None:
            progress(step)
    for run in kept:
        run.end()
    best = min(kept, key=lambda run: run.now)
    return summarise(workload.name, "oracle", seed, best.tally, best.now)


def _depths(workload: Workload) -> list[int]:
    batch = workload.batch
    quarter = max(1, batch.mini_batch // 4)
    return list(range(batch.mini_batch, batch.groups * 3 // 2 + 1, quarter))


def _token_s(workload: Workload) -> float:
    """Seconds per token of all replicas together, with one batch in flight."""
    replicas = workload.topology.hybrid_replicas + workload.topology.standalone_replicas
    running = max(1.0, workload.batch.groups * workload.batch.group_size / replicas)
    return (workload.engine.base_s + workload.engine.per_request_s * running) / (running * replicas)


def _branches(run: SimulatedRun, depths: list[int]) -> list[SimulatedRun]:
    """All ways to end the step of `run` and to train the next."""
    kept = run.copy(Script(False, 0))
    kept.end()
    kept.train()
    lent = run.copy(Script(True, 0))
    lent.end()
    return [kept, *_trained(lent, depths)]


def _trained(lent: SimulatedRun, depths: list[int]) -> list[SimulatedRun]:
    """The next step of a run whose GPUs are lent, with every depth that makes a difference."""
    runs: list[SimulatedRun] = []
    for depth in depths:
        if depth > len(lent.groups.ready) + lent.in_flight + lent.workload.batch.groups:
            break
        run = lent.copy(Script(False, depth))
        run.train()
        runs.append(run)
    return runs


def _best(runs: list[SimulatedRun], beam: int, token_s: float) -> list[SimulatedRun]:
    left = [_left(run) for run in runs]
    by_all = sorted(range(len(runs)), key=lambda i: runs[i].now + token_s * left[i])
    by_less = sorted(range(len(runs)), key=lambda i: runs[i].now + token_s * left[i] / 4)
    chosen = dict.fromkeys(by_all[: beam - beam // 2])
    for index in by_less:
        if len(chosen) == beam:
            break
        chosen[index] = None
    return [runs[index] for index in chosen]


def _left(run: SimulatedRun) -> float:
    """Tokens still to decode of what was added."""
    return sum(end - replica.progress for replica in run.fleet.all for end, _ in replica.ends)
