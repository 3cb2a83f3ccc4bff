"""A whole simulated run: order of events, conservation, fairness between policies."""

from collections import Counter

import numpy as np
import pytest

from services.scheduler.policies import create
from services.scheduler.policies.types import (
    DepthObserved,
    Event,
    GroupFinished,
    GroupsAdded,
    LendDone,
    MiniBatchBegan,
    MiniBatchEnded,
    Point,
    ReclaimDone,
    RequestProgress,
    RunOpened,
    StarvationBegan,
    StarvationEnded,
    StepBegan,
    StepEnded,
    SyncDone,
    TopologyChanged,
)
from services.simulator import Workload, load, simulate
from services.simulator.draws import draw
from services.simulator.policy_decider import PolicyDecider
from services.simulator.run import SimulatedRun

SMALL = load("tiny-batch").model_copy(update={"steps": 8})


class Recorder:
    """A policy that writes down what it sees and answers as another."""

    reads_progress = True
    name = "recorder"

    def __init__(self, workload: Workload, policy: str) -> None:
        self.inner = create(policy, workload.policy_config())
        self.seen: list[Event | Point] = []

    def observe(self, event: Event) -> None:
        self.seen.append(event)
        self.inner.observe(event)

    def decide(self, point: Point, now: float):  # type: ignore[no-untyped-def]
        self.seen.append(point)
        return self.inner.decide(point, now)


def recorded(workload: Workload, policy: str, seed: int = 0) -> tuple[SimulatedRun, list[Event | Point]]:
    recorder = Recorder(workload, policy)
    run = SimulatedRun(workload, draw(workload, seed), PolicyDecider(recorder, workload.progress_s))
    run.begin()
    while not run.done:
        run.step()
    return run, recorder.seen


def test_same_seed_same_result() -> None:
    """Paired comparisons rest on it."""
    assert simulate(SMALL, "jit", 3) == simulate(SMALL, "jit", 3)
    assert simulate(SMALL, "verl", 3).hours != simulate(SMALL, "verl", 4).hours


def test_lengths_do_not_depend_on_costs_or_training() -> None:
    """Workloads that differ in one thing must not differ in luck."""
    other = SMALL.model_copy(update={"costs": SMALL.costs.model_copy(update={"lend_s": 1.0, "log_std": 0.5})})
    assert np.array_equal(draw(SMALL, 1).lengths, draw(other, 1).lengths)


@pytest.mark.parametrize("policy", ["off", "verl", "jit"])
def test_events_come_in_the_order_of_the_trainers_calls(policy: str) -> None:
    """A policy that was tested on another order than the scheduler's fails in service."""
    _, seen = recorded(SMALL, policy)
    assert isinstance(seen[0], RunOpened)
    times = [event.at for event in seen if isinstance(event, Event)]
    assert times == sorted(times)
    main = [
        type(event)
        for event in seen
        if isinstance(
            event, StepBegan | StarvationBegan | StarvationEnded | MiniBatchBegan | MiniBatchEnded | StepEnded
        )
    ]
    mini_batch = [StarvationBegan, StarvationEnded, MiniBatchBegan, MiniBatchEnded]
    assert main == [StepBegan, *mini_batch * 4, StepEnded] * SMALL.steps
    for place, what in enumerate(seen):
        if what is Point.STEP_END:
            before = [each for each in seen[:place] if isinstance(each, DepthObserved | StepEnded)]
            assert isinstance(before[-1], DepthObserved)
            assert isinstance(before[-2], StepEnded)
            assert before[-1].step == before[-2].step + 1


@pytest.mark.parametrize("policy", ["off", "fixed", "verl", "jit"])
def test_every_group_is_trained_once_and_lent_gpus_never_train(policy: str) -> None:
    """Time saved by training on nothing, or on GPUs that generate, is no saving."""
    run, seen = recorded(SMALL, policy)
    batch = SMALL.batch
    assert run.tally.trained_groups == SMALL.steps * batch.groups
    finished = Counter(event.group for event in seen if isinstance(event, GroupFinished))
    assert set(finished.values()) == {1}
    lent = False
    for event in seen:
        if isinstance(event, LendDone):
            lent = True
        elif isinstance(event, ReclaimDone):
            lent = False
        elif isinstance(event, MiniBatchBegan):
            assert not lent
    lends = sum(isinstance(event, LendDone) and event.counted for event in seen)
    assert lends == run.tally.lends


def test_no_lend_at_the_end_of_the_last_step() -> None:
    """Nothing follows it."""
    _, seen = recorded(SMALL, "fixed")
    last = max(place for place, event in enumerate(seen) if isinstance(event, StepEnded))
    assert not any(isinstance(event, LendDone) for event in seen[last:])
    assert isinstance(seen[-1], SyncDone)


def test_wall_clock_is_the_sum_of_its_parts() -> None:
    """Time that nobody accounts for hides a fault."""
    run, _ = recorded(SMALL, "verl")
    for step in run.tally.steps:
        parts = step.wait_s + step.lent_wait_s + step.train_s + step.sync_s + step.lend_s + step.reclaim_s
        assert step.ended_at - step.began_at == pytest.approx(parts, abs=1e-6)


def test_readings_never_show_the_future() -> None:
    """A policy that saw lengths in advance would be an oracle."""
    run, seen = recorded(SMALL, "jit")
    size = SMALL.batch.group_size
    for event in seen:
        if isinstance(event, RequestProgress):
            for state in event.requests:
                final = run.lengths[int(state.key.group[1:]) * size + state.key.trajectory]
                assert state.tokens == final if state.finished else state.tokens <= final


def test_topology_changes_reach_policy_and_engines() -> None:
    """A lost node must slow generation, and the policy must hear of it."""
    workload = load("node-lost").model_copy(update={"steps": 6})
    event = workload.events[0].model_copy(update={"at": 3})
    workload = workload.model_copy(update={"events": (event,)})
    run, seen = recorded(workload, "off")
    changes = [each for each in seen if isinstance(each, TopologyChanged)]
    assert [each.standalone_replicas for each in changes] == [4, 2]
    assert len(run.fleet.standalones) == 2
    assert run.now > recorded(workload.model_copy(update={"events": ()}), "off")[0].now


def test_prompts_are_added_before_the_wait_and_never_without_their_step() -> None:
    """AddGroups comes before PrepareStep: a wait for groups that were never added would last for ever."""
    _, seen = recorded(SMALL, "verl")
    added = [event.step for event in seen if isinstance(event, GroupsAdded)]
    assert added == [1, *range(1, SMALL.steps + 1)]
