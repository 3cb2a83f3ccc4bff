"""A simulated run: the trainer's loop over a fleet, with somebody to decide.

Invariants: steps, calls and events come in the order of the real trainer's calls; time moves only in `_advance`; a run
copied between steps goes on as the original would.

One step: BeginStep; the step's prompts; while GPUs are lent, wait and take them back; mini-batches, each waited for and
trained; EndStep, weight sync, perhaps a lend. During a sync nothing serves; during a lend the standalone replicas do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from services.scheduler.policies.types import (
    Action,
    Decision,
    DepthObserved,
    GroupFinished,
    GroupsAdded,
    LendDone,
    MiniBatchBegan,
    MiniBatchEnded,
    NewGroup,
    Point,
    Pool,
    ReclaimDone,
    RunOpened,
    StarvationBegan,
    StarvationEnded,
    StepBegan,
    StepEnded,
    SyncDone,
    TopologyChanged,
)
from services.simulator.decider import Decider
from services.simulator.draws import Draws, warmup_groups
from services.simulator.fleet import Fleet
from services.simulator.profile import factor
from services.simulator.tally import StepTally, Tally
from services.simulator.workload import Workload

# Waking a wait at the same instant for ever would hang a simulation whose policy asks to be asked again at once.
_SHORTEST_RECHECK_S = 0.05


@dataclass(slots=True)
class Groups:
    """Groups by number, in the order of their addition. `ready` are finished and not yet trained on."""

    born: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)

    def copy(self) -> Groups:
        return Groups(self.born.copy(), self.left.copy(), self.ready.copy())


class SimulatedRun:
    """Call `begin`, then `step` until `done`; or `begin`, and `train` and `end` in turn."""

    def __init__(self, workload: Workload, draws: Draws, decider: Decider) -> None:
        self.workload = workload
        self.draws = draws
        self.decider = decider
        self.now = 0.0
        self.lent = False
        self.steps_done = 0
        self.tally = Tally()
        self.lengths: list[int] = draws.lengths.ravel().tolist()
        self.groups = Groups()
        self.first_version: list[int] = []
        self.last_version: list[int] = []
        self.finished_requests: list[int] = []
        """Requests that finished since the decider's last reading cleared them."""
        self.fleet = Fleet(workload, self.lengths)
        self._size = workload.batch.group_size
        self._tick_at = inf if decider.ticks_s is None else 0.0
        self._log: StepTally = StepTally(step=0)

    def copy(self, decider: Decider) -> SimulatedRun:
        """An independent run in the same state, which `decider` decides. Only between `train` and `end` or steps."""
        other = SimulatedRun.__new__(SimulatedRun)
        other.workload, other.draws, other.lengths = self.workload, self.draws, self.lengths
        other.decider = decider
        other.now, other.lent, other.steps_done = self.now, self.lent, self.steps_done
        other.tally = self.tally.copy()
        other.groups = self.groups.copy()
        other.first_version, other.last_version = self.first_version.copy(), self.last_version.copy()
        other.finished_requests = []
        other.fleet = self.fleet.copy()
        other._size = self._size
        other._tick_at = inf if decider.ticks_s is None else self.now
        other._log = replace(self._log)
        return other

    @property
    def done(self) -> bool:
        """Whether all steps are over."""
        return self.steps_done == self.workload.steps

    @property
    def in_flight(self) -> int:
        """Groups that are not finished."""
        return len(self.groups.born) - len(self.groups.ready) - self.tally.trained_groups

    @property
    def version(self) -> int:
        """The weights that engines hold."""
        return self.steps_done

    # -------------------------------------------------------------------------------------------------- steps

    def begin(self) -> None:
        """Open the run: engines get their first weights, GPUs are lent, the warm-up batches are added."""
        topology, costs = self.workload.topology, self.workload.costs
        self.now = costs.sync_s + costs.lend_s
        self.decider.tell(RunOpened(at=self.now, config=self.workload.policy_config()))
        self.lent = True
        self._resize(topology.hybrid_replicas, topology.standalone_replicas)
        self.decider.tell(LendDone(at=self.now, cost_s=costs.lend_s, counted=False))
        self._set_speed(1)
        self._add_groups(warmup_groups(self.workload), 1)

    def step(self) -> None:
        """Run the next step, up to its sync and lend."""
        self.train()
        self.end()

    def train(self) -> None:
        """Run the next step up to its end, which is still to be decided."""
        step = self.steps_done + 1
        self._log = StepTally(step=step, began_at=self.now)
        for event in self.workload.events:
            if event.at == step:
                self._resize(event.hybrid_replicas, event.standalone_replicas)
        self._set_speed(step)
        self.decider.tell(StepBegan(at=self.now, step=step))
        if self.lent:
            self._observe_depth(step)
            if self._decide(Point.STEP_BEGIN).action is Action.RECLAIM:
                self._reclaim(step)
        self._add_groups(self.workload.batch.groups, step)
        if self.lent:
            self._wait_lent(step)
        for mini_batch in range(self.workload.batch.groups // self.workload.batch.mini_batch):
            self._mini_batch(step, mini_batch)

    def end(self) -> None:
        """End the step that `train` ran: decide, sync, and lend if so decided."""
        step = self.steps_done + 1
        self.decider.tell(StepEnded(at=self.now, step=step))
        self._observe_depth(step + 1)
        decision = self._decide(Point.STEP_END)
        lend = decision.action is Action.LEND and step < self.workload.steps
        self.steps_done = step
        began = self.now
        if lend:
            self.fleet.lend(self._preferred(decision), self.now)
        else:
            self.fleet.sync(self.now)
        self._advance(began + float(self.draws.sync_s[step - 1]))
        self.fleet.serve(self.fleet.standalones, self.now)
        self.decider.tell(SyncDone(at=self.now, cost_s=self.now - began))
        self._log.sync_s = self.now - began
        if lend:
            self._finish_lend(step)
        self._log.ended_at = self.now
        self.tally.add(self._log)

    def _mini_batch(self, step: int, mini_batch: int) -> None:
        asked = self.now
        self._observe_depth(step)
        sampleable = len(self.groups.ready)
        self.decider.tell(StarvationBegan(at=asked, step=step, mini_batch=mini_batch, sampleable=sampleable))
        if self._decide(Point.SAMPLE_BEGIN).action is Action.LEND and self.workload.reinstall_within_step:
            self._lend_within_step(step)
            self._wait_lent(step)
        while len(self.groups.ready) < self.workload.batch.mini_batch:
            self._advance(inf, until_arrival=True)
        wait = self.now - asked
        self._log.wait_s += wait
        self._consume(step)
        self.decider.tell(StarvationEnded(at=self.now, step=step, mini_batch=mini_batch, wait_s=wait))
        self.decider.tell(MiniBatchBegan(at=self.now, step=step, mini_batch=mini_batch))
        train_s = float(self.draws.train_s[step - 1, mini_batch])
        self._advance(self.now + train_s)
        self._log.train_s += train_s
        self.decider.tell(MiniBatchEnded(at=self.now, step=step, mini_batch=mini_batch))

    # --------------------------------------------------------------------------------------------- GPUs moving

    def _lend_within_step(self, step: int) -> None:
        self.fleet.lend(None, self.now)
        self.fleet.serve(self.fleet.standalones, self.now)
        self._finish_lend(step)

    def _finish_lend(self, step: int) -> None:
        began = self.now
        self._advance(began + float(self.draws.lend_s[step - 1]))
        self.fleet.serve(self.fleet.hybrids, self.now)
        self.lent = True
        self.tally.lends += 1
        self._log.lend_s += self.now - began
        self.decider.tell(LendDone(at=self.now, cost_s=self.now - began))

    def _reclaim(self, step: int) -> None:
        began = self.now
        self.fleet.reclaim(began)
        self._log.reclaimed_at = began
        self._log.reclaimed_depth = len(self.groups.ready)
        self._advance(began + float(self.draws.reclaim_s[step - 1]))
        self.lent = False
        self._log.reclaim_s += self.now - began
        self.decider.tell(ReclaimDone(at=self.now, cost_s=self.now - began))

    def _wait_lent(self, step: int) -> None:
        """Wait until the decider wants the GPUs back, or nothing can arrive any more."""
        began = self.now
        while True:
            self._observe_depth(step)
            decision = self._decide(Point.WAITING)
            if decision.action is Action.RECLAIM or self.in_flight == 0:
                break
            recheck = inf if decision.recheck_at is None else max(decision.recheck_at, self.now + _SHORTEST_RECHECK_S)
            self._advance(recheck, until_arrival=True)
        self._log.lent_wait_s += self.now - began
        self._reclaim(step)

    def _preferred(self, decision: Decision) -> tuple[list[int], list[int]] | None:
        if decision.placement is None:
            return None
        hybrid, standalone = (
            [int(key.group[1:]) * self._size + key.trajectory for key in keys]
            for keys in (decision.placement.hybrid, decision.placement.standalone)
        )
        return hybrid, standalone

    # -------------------------------------------------------------------------------------------------- groups

    def _add_groups(self, count: int, step: int) -> None:
        first, supply = len(self.groups.born), self.workload.batch.supply
        if supply is not None:
            count = min(count, supply - first)
        added = range(first, first + count)
        self.groups.born += [step] * count
        self.groups.left += [self._size] * count
        requests = range(first * self._size, (first + count) * self._size)
        self.first_version += [self.version] * len(requests)
        self.last_version += [self.version] * len(requests)
        prompt = self.workload.lengths.prompt_tokens
        groups = tuple(NewGroup(group=f"g{number}", size=self._size, prompt_tokens=prompt) for number in added)
        self.decider.tell(GroupsAdded(at=self.now, step=step, groups=groups))
        self.fleet.add(requests, self.now)

    def _consume(self, step: int) -> None:
        """Train on the oldest finished groups, as the buffer samples them."""
        mini_batch, size = self.workload.batch.mini_batch, self._size
        # `ready` is in the order of arrival and numbers grow with the step of birth: sorting numbers sorts by birth.
        self.groups.ready.sort()
        taken, self.groups.ready = self.groups.ready[:mini_batch], self.groups.ready[mini_batch:]
        self.tally.trained_groups += len(taken)
        for group in taken:
            for request in range(group * size, (group + 1) * size):
                self._log.spans += self.last_version[request] - self.first_version[request] + 1
                self._log.staleness += step - 1 - self.last_version[request]
        self._log.trajectories += mini_batch * size

    def _observe_depth(self, step: int) -> None:
        self.decider.tell(
            DepthObserved(
                at=self.now,
                step=step,
                sampleable=len(self.groups.ready),
                in_flight=self.in_flight,
                unpaid_credits=0,
            )
        )

    def _decide(self, point: Point) -> Decision:
        decision = self.decider.decide(point, self)
        self._log.decisions += 1
        return decision

    # ---------------------------------------------------------------------------------------------------- time

    def _set_speed(self, step: int) -> None:
        self.fleet.set_speed(factor(self.workload.engine.speed, step, self.workload.steps), self.now)

    def _resize(self, hybrids: int, standalones: int) -> None:
        self.fleet.advance(self.now)
        self.fleet.resize(hybrids, standalones, self.lent, self.now)
        gpus = self.workload.topology.gpus_per_replica
        self.decider.tell(
            TopologyChanged(
                at=self.now,
                hybrid_gpus=hybrids * gpus,
                standalone_gpus=standalones * gpus,
                hybrid_replicas=hybrids,
                standalone_replicas=standalones,
            )
        )

    def _advance(self, until: float, *, until_arrival: bool = False) -> None:
        """Let time pass until `until`, or with `until_arrival` until a group finishes if that is sooner."""
        fleet = self.fleet
        while True:
            at, replica = fleet.next()
            stop = min(until, self._tick_at)
            if at >= stop or replica is None:
                if stop == inf:
                    raise AssertionError("the trainer waits and nothing runs")
                self.now = max(self.now, stop)
                if stop == until:
                    return
                fleet.advance(self.now)
                self.decider.tick(self)
                self._tick_at = self.now + (self.decider.ticks_s or inf)
                continue
            self.now = max(self.now, at)
            replica.advance(self.now)
            if self._finish(replica.pop(), replica.hybrid) and until_arrival:
                return

    def _finish(self, request: int, hybrid: bool) -> bool:
        """Note that a request is complete; whether its group is."""
        self.last_version[request] = self.version
        self.finished_requests.append(request)
        group = request // self._size
        self.groups.left[group] -= 1
        if self.groups.left[group]:
            return False
        self.groups.ready.append(group)
        lengths = tuple(self.lengths[group * self._size : (group + 1) * self._size])
        pool = Pool.HYBRID if hybrid else Pool.STANDALONE
        self.decider.tell(GroupFinished(at=self.now, group=f"g{group}", lengths=lengths, pool=pool))
        return True
