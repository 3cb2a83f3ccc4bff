"""The `jit` policy as a whole, driven by hand and by the simulator."""

import copy
import time
from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.policies import EventOrderError, create
from services.scheduler.policies.jit import JitPolicy
from services.scheduler.policies.types import (
    Action,
    Decision,
    DepthObserved,
    Event,
    GroupFinished,
    GroupsAdded,
    LendDone,
    MiniBatchBegan,
    MiniBatchEnded,
    NewGroup,
    Point,
    Pool,
    ReclaimDone,
    ReplicaCounters,
    RequestKey,
    RequestProgress,
    RequestState,
    RunOpened,
    StepBegan,
    StepEnded,
    SyncDone,
    TopologyChanged,
)
from services.simulator import Workload, load, simulate
from services.simulator.draws import draw
from services.simulator.policy_decider import PolicyDecider
from services.simulator.run import SimulatedRun
from tests.scheduler.policies.drive import RUN, configured

SIZE = 8


class Scene:
    """A run of the published shape in which nothing is known but what a test says."""

    def __init__(self, *, enable_switch: bool = True, reinstall: bool = False, seed: int = 1) -> None:
        run = replace(RUN, reinstall_within_step=reinstall, max_response_length=32_768)
        self.policy = JitPolicy(configured(run, enable_switch=enable_switch))
        self.generator = np.random.default_rng(seed)
        self.now = 0.0
        self.feed(RunOpened(at=0, config=configured(run, enable_switch=enable_switch)))
        self.feed(TopologyChanged(at=0, hybrid_gpus=16, standalone_gpus=8, hybrid_replicas=4, standalone_replicas=2))

    def feed(self, *events: Event) -> None:
        for event in events:
            self.policy.observe(event)

    def history(self, groups: int = 128) -> None:
        """Finished groups, speeds and costs as published; a step that took 256 s."""
        for number in range(groups):
            level = 9.2 + 0.69 * self.generator.normal()
            lengths = np.clip(np.exp(level + 0.29 * self.generator.normal(size=SIZE)), 1, 32_768)
            self.feed(GroupFinished(at=0, group=f"old{number}", lengths=tuple(int(each) for each in lengths)))
        for at in (0.0, 10.0, 20.0):
            for name, running in (("a", 100), ("b", 250)):
                tokens = int(running * at / (0.00975 + 0.000078 * running))
                self.feed(
                    ReplicaCounters(
                        at=at,
                        replica=name,
                        pool=Pool.STANDALONE,
                        decoded_tokens=tokens,
                        running_requests=running,
                        prefill_tokens_per_s=60_000,
                    )
                )
        self.feed(LendDone(at=20, cost_s=15), ReclaimDone(at=20, cost_s=5), SyncDone(at=20, cost_s=18))
        self.feed(StepBegan(at=20, step=1))
        for index in range(4):
            self.feed(MiniBatchBegan(at=20 + 64 * index, step=1, mini_batch=index))
            self.feed(MiniBatchEnded(at=84 + 64 * index, step=1, mini_batch=index))
        self.now = 276.0

    def running(self, groups: int, tokens: int = 3000, covered: float = 1.0, pool: Pool = Pool.STANDALONE) -> None:
        """So many groups run, every member with about `tokens`."""
        names = [f"g{number}" for number in range(groups)]
        self.feed(GroupsAdded(at=self.now, step=1, groups=tuple(NewGroup(group=name, size=SIZE) for name in names)))
        states = tuple(
            RequestState(key=RequestKey(name, member), tokens=tokens + member, replica="a", pool=pool)
            for name in names
            for member in range(SIZE)
        )
        self.feed(RequestProgress(at=self.now, requests=states, covered_share=covered))

    def end(self, step: int, sampleable: int, in_flight: int) -> Decision:
        self.feed(
            StepEnded(at=self.now, step=step),
            DepthObserved(at=self.now, step=step + 1, sampleable=sampleable, in_flight=in_flight, unpaid_credits=0),
        )
        return self.policy.decide(Point.STEP_END, self.now)

    def waiting(self, step: int, sampleable: int, in_flight: int, point: Point = Point.WAITING) -> Decision:
        self.feed(
            StepBegan(at=self.now, step=step),
            DepthObserved(at=self.now, step=step, sampleable=sampleable, in_flight=in_flight, unpaid_credits=0),
        )
        return self.policy.decide(point, self.now)


# ------------------------------------------------------------------------------------------------ at a step's end


def test_lends_when_the_next_step_would_wait_long() -> None:
    """64 groups in flight and none there: two replicas need minutes for them, six need half of that."""
    scene = Scene()
    scene.history()
    scene.running(64)
    decision = scene.end(1, sampleable=0, in_flight=64)
    assert decision.action is Action.LEND
    assert decision.numbers["gain_seconds"] > 20
    assert decision.numbers["wait_alone_seconds"] > decision.numbers["wait_lent_seconds"]
    assert "would wait" in decision.reason
    placement = decision.placement
    assert placement is not None
    placed = [*placement.hybrid, *placement.standalone]
    assert len(placed) == len(set(placed)) == 64 * SIZE


def test_longest_prefixes_stay_on_standalone_replicas() -> None:
    """What moves has to be prefilled again, at the lend and at the reclaim."""
    scene = Scene()
    scene.history()
    names = [f"g{number}" for number in range(64)]
    scene.feed(GroupsAdded(at=scene.now, step=1, groups=tuple(NewGroup(group=name, size=SIZE) for name in names)))
    states = tuple(
        RequestState(
            key=RequestKey(name, member),
            tokens=6000 if number < 20 else 100,
            replica="a",
            pool=Pool.STANDALONE,
        )
        for number, name in enumerate(names)
        for member in range(SIZE)
    )
    scene.feed(RequestProgress(at=scene.now, requests=states, covered_share=1.0))
    placement = scene.end(1, sampleable=0, in_flight=64).placement
    assert placement is not None
    assert set(placement.standalone) >= {RequestKey(f"g{n}", m) for n in range(20) for m in range(SIZE)}


def test_does_not_lend_when_training_covers_generation() -> None:
    """A batch and a half is there: the next step will wait for nothing."""
    scene = Scene()
    scene.history()
    scene.running(16)
    decision = scene.end(1, sampleable=96, in_flight=16)
    assert decision.action is Action.KEEP
    assert decision.numbers["wait_alone_seconds"] == pytest.approx(0.0, abs=1e-6)


def test_a_batch_that_is_yet_to_come_has_not_decoded_since_the_last_reading() -> None:
    """Everything had finished at the step's end: the next batch was taken for as far along as the reading was old, and
    no lend ever looked worth it."""
    scene = Scene()
    scene.history()
    scene.running(4)
    for number in range(4):
        scene.feed(GroupFinished(at=scene.now, group=f"g{number}", lengths=(4000,) * SIZE))
    scene.now += 600
    decision = scene.end(1, sampleable=4, in_flight=0)
    assert decision.numbers["wait_alone_seconds"] > 100


def test_a_step_that_a_crash_of_the_trainer_cut_teaches_nothing() -> None:
    """The hour until it was back was taken for an error of the prediction, and for a wait after the reclaim."""
    scene = Scene()
    scene.history()
    scene.running(64)
    scene.end(1, sampleable=0, in_flight=64)
    scene.feed(LendDone(at=scene.now, cost_s=15), StepBegan(at=scene.now, step=2))
    scene.feed(ReclaimDone(at=scene.now, cost_s=5))
    before = copy.deepcopy(scene.policy)
    scene.now += 3600
    scene.feed(RunOpened(at=scene.now, config=configured(RUN, enable_switch=True)))
    scene.feed(StepBegan(at=scene.now, step=2), StepEnded(at=scene.now, step=2))
    assert scene.policy._guard.correction_s == before._guard.correction_s
    assert scene.policy._known.hindsight.stretch == before._known.hindsight.stretch


def test_never_lends_at_the_last_step() -> None:
    """Nothing follows it."""
    scene = Scene()
    scene.history()
    scene.running(64)
    assert scene.end(RUN.total_training_steps, 0, 64).action is Action.KEEP


def test_without_history_a_lend_is_tried() -> None:
    """Otherwise costs and lengths would never be learned where the first lend is refused."""
    scene = Scene()
    scene.feed(StepBegan(at=1, step=1))
    assert scene.end(1, sampleable=0, in_flight=64).action is Action.LEND
    assert scene.end(1, sampleable=64, in_flight=0).action is Action.KEEP


# ------------------------------------------------------------------------------------------------- while GPUs are lent


def lent(scene: Scene) -> Scene:
    scene.feed(LendDone(at=scene.now, cost_s=15))
    return scene


def test_reclaims_when_the_rest_will_be_in_time_and_says_so() -> None:
    """62 of 64 groups are there, and two of 80 have 200 s of training to arrive."""
    scene = Scene()
    scene.history()
    lent(scene).running(80, tokens=300)
    decision = scene.waiting(2, sampleable=62, in_flight=80)
    assert decision.action is Action.RECLAIM
    assert decision.reason.startswith("Reclaimed at 62 groups: the remaining 2 should keep the trainer waiting")
    assert decision.predicted_wait_s is not None


def test_keeps_lending_while_that_ends_the_step_sooner() -> None:
    """Just a mini-batch is there and all else has only begun."""
    scene = Scene()
    scene.history()
    lent(scene).running(100, tokens=10, pool=Pool.HYBRID)
    decision = scene.waiting(2, sampleable=16, in_flight=100)
    assert decision.action is Action.KEEP
    assert decision.recheck_at is not None
    assert scene.now < decision.recheck_at <= scene.now + 10


def test_less_than_a_mini_batch_is_nothing_to_train_on() -> None:
    """The trainer would only wait with its GPUs idle."""
    scene = Scene()
    scene.history()
    lent(scene).running(100)
    assert scene.waiting(2, sampleable=15, in_flight=100).action is Action.KEEP


@pytest.mark.parametrize("sampleable", [3, 30])
def test_reclaims_when_nothing_more_can_come(sampleable: int) -> None:
    """Waiting for ever is worse than any prediction."""
    scene = Scene()
    scene.history()
    lent(scene)
    assert scene.waiting(2, sampleable=sampleable, in_flight=0).action is Action.RECLAIM
    assert scene.waiting(2, sampleable=sampleable, in_flight=0, point=Point.STEP_BEGIN).action is Action.KEEP or (
        sampleable == 30
    )


def test_until_lengths_are_known_half_a_batch_is_enough() -> None:
    """The first step of a run."""
    scene = lent(Scene())
    assert scene.waiting(1, sampleable=31, in_flight=90).action is Action.KEEP
    decision = scene.waiting(1, sampleable=32, in_flight=90)
    assert (decision.action, decision.threshold) == (Action.RECLAIM, 32)


def test_a_step_that_is_not_open_cannot_be_decided() -> None:
    """A fault of the caller, never of the run."""
    scene = lent(Scene())
    with pytest.raises(EventOrderError, match="no step is open"):
        scene.policy.decide(Point.WAITING, 0.0)
    with pytest.raises(EventOrderError, match="no step has ended"):
        scene.policy.decide(Point.STEP_END, 0.0)
    scene.feed(StepBegan(at=0, step=1))
    with pytest.raises(EventOrderError, match="depth of step 1 was not observed"):
        scene.policy.decide(Point.WAITING, 0.0)


# ----------------------------------------------------------------------------------------------------- within a step


@pytest.mark.parametrize(("reinstall", "action"), [(False, Action.KEEP), (True, Action.LEND)])
def test_lends_within_a_step_only_if_weights_can_be_installed(reinstall: bool, action: Action) -> None:
    """A trainer that holds half-stepped weights would generate with them."""
    scene = Scene(reinstall=reinstall)
    scene.history()
    scene.running(64, tokens=10)
    scene.feed(
        StepBegan(at=scene.now, step=2),
        DepthObserved(at=scene.now, step=2, sampleable=0, in_flight=64, unpaid_credits=0),
    )
    decision = scene.policy.decide(Point.SAMPLE_BEGIN, scene.now)
    assert decision.action is action


def test_does_not_lend_within_a_step_that_does_not_starve() -> None:
    """Training is what the GPUs are for."""
    scene = Scene(reinstall=True)
    scene.history()
    scene.running(64, tokens=10)
    scene.feed(DepthObserved(at=scene.now, step=2, sampleable=16, in_flight=64, unpaid_credits=0))
    assert scene.policy.decide(Point.SAMPLE_BEGIN, scene.now).action is Action.KEEP


# ----------------------------------------------------------------------------------------------------------- guards


def test_below_95_percent_coverage_verl_decides_and_the_answer_says_so() -> None:
    """Predictions from half of the requests are worse than none."""
    scene = Scene()
    scene.history()
    scene.running(64, covered=0.94)
    decision = scene.end(1, sampleable=0, in_flight=64)
    verl = create("verl", configured(RUN))
    assert decision.reason.startswith("Only 94% of the running requests are visible, so verl decides: ")
    assert decision.threshold is not None
    assert decision.numbers["covered_share"] == 0.94
    assert verl.name == "verl"
    scene.running(64, covered=0.95)
    assert "verl decides" not in scene.end(1, 0, 64).reason


def test_where_no_request_was_ever_seen_verl_decides_once_groups_have_finished() -> None:
    """Without any progress there is no share to be below 95 %, and the policy lent for ever to find out."""
    scene = Scene()
    assert "verl decides" not in scene.end(1, 0, 64).reason
    scene.history()
    scene.feed(StepBegan(at=scene.now, step=2))
    assert scene.end(2, 0, 64).reason.startswith("None of the running requests is visible, so verl decides: ")


def test_a_trainer_that_came_back_is_not_told_that_all_is_visible_and_therefore_verl_decides() -> None:
    """Nothing of the new life was read yet, but the share of the life before was still told."""
    scene = Scene()
    scene.history()
    scene.running(64)
    scene.feed(RunOpened(at=scene.now, config=configured(RUN, enable_switch=True)))
    decision = scene.end(1, 0, 64)
    assert decision.reason.startswith("None of the running requests is visible, so verl decides: ")
    assert decision.numbers["covered_share"] == 0


def test_another_configuration_makes_nothing_unseen() -> None:
    """What had just been read was forgotten, groups that nobody ran yet for good."""
    scene = Scene()
    scene.history()
    scene.running(64)
    scene.feed(RunOpened(at=scene.now, config=configured(RUN, enable_switch=True), goes_on=True))
    assert "verl decides" not in scene.end(1, 0, 64).reason
    assert len(scene.policy._known.groups) == 64


def test_switching_off_is_off() -> None:
    """No policy lends where it is not allowed to."""
    scene = Scene(enable_switch=False)
    scene.history()
    scene.running(64)
    assert scene.end(1, 0, 64).action is Action.KEEP
    lent(scene)
    assert scene.waiting(2, 0, 64).action is Action.RECLAIM


def test_asking_twice_gives_the_same_answer_and_so_does_a_copy() -> None:
    """A checkpoint copies the policy; a repeated question must not move a decision."""
    scene = Scene()
    scene.history()
    scene.running(64)
    first = scene.end(1, 0, 64)
    assert scene.policy.decide(Point.STEP_END, scene.now) == first
    assert copy.deepcopy(scene.policy).decide(Point.STEP_END, scene.now) == first


def test_replicas_are_counted_where_no_topology_is_told() -> None:
    """The load of one replica, not of one GPU, sets the speed."""
    policy = JitPolicy(configured(RUN))
    for name, pool in (("h1", Pool.HYBRID), ("h2", Pool.HYBRID), ("s1", Pool.STANDALONE)):
        policy.observe(ReplicaCounters(at=1, replica=name, pool=pool, decoded_tokens=1, running_requests=1))
    assert (policy._known.hybrids, policy._known.standalones) == (2, 1)


def test_a_decision_takes_less_than_20_ms_with_1024_requests_in_flight() -> None:
    """It is taken while a trainer waits. The fastest of five, since this machine may be busy."""
    scene = Scene()
    scene.history(groups=192)
    took = []
    for attempt in range(5):
        scene.now += 1.0
        scene.running(128, tokens=3000 + attempt)
        began = time.process_time()
        decision = scene.end(1, 0, 128)
        took.append(time.process_time() - began)
        assert decision.numbers["gain_seconds"] != 0
    assert min(took) < 0.020


# -------------------------------------------------------------------------------------------------------- simulated


def short(name: str, steps: int) -> Workload:
    return load(name).model_copy(update={"steps": steps})


def test_saves_more_than_verl_in_the_published_setting() -> None:
    """What it is there for: at least 1.5 % of the wall clock, on one seed of 25 steps."""
    workload = short("calibrated", 25)
    assert simulate(workload, "jit", 0).hours < 0.985 * simulate(workload, "verl", 0).hours


@pytest.mark.parametrize(("workload", "steps"), [("train-bound", 12), ("tiny-batch", 100)])
def test_costs_next_to_nothing_where_nothing_can_be_gained(workload: str, steps: int) -> None:
    """verl loses 3 % on the tiny batch."""
    assert simulate(short(workload, steps), "jit", 0).hours < 1.002 * simulate(short(workload, steps), "off", 0).hours


@pytest.mark.parametrize("cover", [0.5, 0.94])
def test_a_run_that_is_half_seen_goes_as_with_verl(cover: float) -> None:
    """Decision by decision, once the first reading has come."""
    workload = short("tiny-batch", 10)
    hours = []
    for name, share in (("jit", cover), ("verl", 1.0)):
        policy = create(name, workload.policy_config())
        run = SimulatedRun(workload, draw(workload, 0), PolicyDecider(policy, workload.progress_s, share))
        run.begin()
        while not run.done:
            run.step()
        hours.append(run.now)
    assert hours[0] == pytest.approx(hours[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "workload",
    [
        "bimodal",
        "bimodal-costly",
        "slow-prefill",
        "oscillating-speed",
        "ratio-1-1",
        "switch-cost-40s",
        "switch-cost-120s",
    ],
)
def test_saves_more_than_verl_elsewhere(workload: str) -> None:
    """No regime is left in which looking back is better than looking ahead."""
    each = short(workload, 50)
    assert simulate(each, "jit", 1).hours < simulate(each, "verl", 1).hours
