"""`verl` against a second transcription of the design's formulas, over random runs."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policies import create
from services.scheduler.policies.types import Action, Decision, Point, PolicyConfig, RunConfig, SwitchConfig
from tests.scheduler.policies.drive import Drive

SECONDS = st.one_of(st.just(0.0), st.just(2.0), st.floats(0, 500))


@dataclass(frozen=True, slots=True)
class Sampled:
    sampleable: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class RandomStep:
    begin_depth: int
    arrivals: list[int]
    samples: list[Sampled]
    end_depth: int
    lend_cost: float
    reclaim_cost: float
    validation_cost: float | None


@dataclass
class Formulas:
    """The `verl` paragraph of the design, kept flat and naive on purpose."""

    c: PolicyConfig
    ratio: float = 0.0
    idle: int = 0
    calm: int = 0
    wait: float = 0.0
    missing: int = 0
    lends: list[float] = field(default_factory=list)
    reclaims: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ratio = self.c.switch.switch_threshold_ratio

    def threshold(self) -> int:
        run = self.c.run
        return max(1, sorted([run.mini_batch_size, round(self.ratio * run.train_batch_size), run.train_batch_size])[1])

    def end_step(self, s: int, samples: list[Sampled], depth: int) -> tuple[bool, dict[str, float]]:
        run, switch = self.c.run, self.c.switch
        ratio_before = self.ratio
        step_missing = sum(max(0, run.mini_batch_size - x.sampleable) for x in samples)
        step_wait = 0.0
        for x in samples:
            step_wait += x.wait_s
        is_idle = step_wait > run.idle_tolerance_s
        if step_missing > 0 and step_wait > 0:
            self.wait += step_wait
            self.missing += step_missing
        if switch.adaptive_switch_threshold:
            release = switch.switch_threshold_release_steps
            if is_idle:
                self.idle, self.calm = min(self.idle + 1, release), 0
                if self.idle >= release:
                    self.ratio = min(1.0, self.ratio + switch.switch_threshold_step_up)
            else:
                self.idle, self.calm = 0, min(self.calm + 1, release)
                if self.calm >= release:
                    share = run.mini_batch_size / run.train_batch_size
                    self.ratio = max(share, self.ratio - switch.switch_threshold_step_down)
        remaining = max(0, self.threshold() - depth)
        scaling = (run.hybrid_gpus + run.standalone_gpus) / run.standalone_gpus
        expected = {
            "threshold_ratio": ratio_before,
            "wait_samples": step_missing,
            "idle": float(is_idle),
            "sampleable_count": depth,
            "remaining": remaining,
        }
        benefit = cost = None
        if self.missing:
            benefit = remaining * (self.wait / self.missing) * (1 - 1 / scaling)
            expected |= {"per_sample_time_seconds": self.wait / self.missing, "benefit_seconds": benefit}
        if self.lends and self.reclaims:
            w = switch.switch_cost_window_size
            lends, reclaims = self.lends[-w:], self.reclaims[-w:]
            cost = sum(lends) / len(lends) + sum(reclaims) / len(reclaims)
            expected["effective_switch_cost_seconds"] = cost
        lend = s < run.total_training_steps and remaining > 0 and (benefit is None or cost is None or benefit > cost)
        return lend, expected | {"should_switch_to_rollout": float(lend)}


@st.composite
def configs(draw: st.DrawFn) -> PolicyConfig:
    mini_batch, sync_steps = draw(st.integers(1, 20)), draw(st.integers(1, 6))
    return PolicyConfig(
        run=RunConfig(
            train_batch_size=mini_batch * sync_steps,
            mini_batch_size=mini_batch,
            total_training_steps=draw(st.integers(1, 12)),
            hybrid_gpus=draw(st.integers(0, 32)),
            standalone_gpus=draw(st.integers(1, 32)),
            idle_tolerance_s=draw(st.sampled_from([0.0, 2.0, 30.0])),
        ),
        switch=SwitchConfig(
            enable_switch=True,
            switch_threshold_ratio=draw(st.floats(0.01, 1)),
            adaptive_switch_threshold=draw(st.booleans()),
            switch_threshold_step_up=draw(st.sampled_from([0.0, 0.05, 0.3])),
            switch_threshold_step_down=draw(st.sampled_from([0.0, 0.03, 0.3])),
            switch_threshold_release_steps=draw(st.integers(1, 4)),
            switch_cost_window_size=draw(st.integers(1, 4)),
        ),
    )


DEPTHS = st.integers(0, 130)
STEPS = st.builds(
    RandomStep,
    begin_depth=DEPTHS,
    arrivals=st.lists(st.integers(1, 40), max_size=5),
    samples=st.lists(st.builds(Sampled, sampleable=st.integers(0, 30), wait_s=SECONDS), min_size=1, max_size=6),
    end_depth=DEPTHS,
    lend_cost=SECONDS,
    reclaim_cost=SECONDS,
    validation_cost=st.one_of(st.none(), SECONDS),
)


def run_both(config: PolicyConfig, steps: list[RandomStep]) -> list[tuple[Point, float, int, Decision]]:
    """Drive `verl` through `steps`, lending and reclaiming as it says, and check every answer against the formulas.

    Returns each decision with its point, time and the number of events before it.
    """
    formulas = Formulas(config)
    drive = Drive("verl", config)
    asked: list[tuple[Point, float, int, Decision]] = []

    def ask(point: Point) -> Decision:
        decision = drive.decide(point)
        asked.append((point, drive.now, len(drive.events), decision))
        return decision

    def reclaim(cost: float) -> None:
        drive.reclaim_done(cost)
        formulas.reclaims.append(cost)

    drive.lend_done(1e4, counted=False)
    lent = True
    for s, step in enumerate(steps, start=1):
        drive.begin(s)
        threshold = formulas.threshold()
        depth = step.begin_depth
        drive.depth(s, depth)
        begin = ask(Point.STEP_BEGIN)
        assert begin.threshold == threshold
        assert (begin.action is Action.RECLAIM) == (lent and depth >= threshold)
        if begin.action is Action.RECLAIM:
            reclaim(step.reclaim_cost)
            lent = False
        for arrived in [*step.arrivals, threshold] if lent else []:
            depth += arrived
            drive.depth(s, depth)
            waiting = ask(Point.WAITING)
            assert waiting.threshold == threshold
            assert (waiting.action is Action.RECLAIM) == (depth >= threshold)
            if waiting.action is Action.RECLAIM:
                reclaim(step.reclaim_cost)
                lent = False
                break
        assert not lent
        for mini_batch, sampled in enumerate(step.samples):
            drive.ask(s, mini_batch, sampled.sampleable)
            assert ask(Point.SAMPLE_BEGIN).action is Action.KEEP
            drive.got(s, mini_batch, sampled.wait_s)
        end = drive.end(s, step.end_depth)
        asked.append((Point.STEP_END, drive.now, len(drive.events), end))
        lend, expected = formulas.end_step(s, step.samples, step.end_depth)
        optional = {"per_sample_time_seconds", "benefit_seconds", "effective_switch_cost_seconds"}
        assert {name: end.numbers[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        assert optional & end.numbers.keys() == optional & expected.keys()
        assert end.action is (Action.LEND if lend else Action.KEEP)
        if lend:
            drive.lend_done(step.lend_cost)
            formulas.lends.append(step.lend_cost)
            lent = True
        elif step.validation_cost is not None:
            drive.lend_done(step.validation_cost, counted=False)
            lent = True

    replayed = create("verl", config)
    position = 0
    for point, now, events, decision in asked:
        for event in drive.events[position:events]:
            replayed.observe(event)
        position = events
        assert replayed.decide(point, now) == decision
    return asked


@given(config=configs(), steps=st.lists(STEPS, min_size=1, max_size=14))
@settings(max_examples=300, deadline=None)
def test_verl_equals_the_formulas_and_a_replay_equals_the_run(config: PolicyConfig, steps: list[RandomStep]) -> None:
    """Any slip in a rule, its order or its timing shows here; so does state that does not come from events."""
    run_both(config, steps)


def test_differential_run_reaches_every_action() -> None:
    """A generator that never lends would make the comparison empty."""
    config = PolicyConfig(
        run=RunConfig(
            train_batch_size=64, mini_batch_size=16, total_training_steps=4, hybrid_gpus=16, standalone_gpus=8
        ),
        switch=SwitchConfig(enable_switch=True),
    )
    step = RandomStep(0, [30], [Sampled(4, 60.0)], 0, 15.0, 5.0, None)
    actions = [(point, decision.action) for point, _, _, decision in run_both(config, [step] * 4)]
    assert actions.count((Point.STEP_END, Action.LEND)) == 3
    assert actions.count((Point.STEP_END, Action.KEEP)) == 1
    assert actions.count((Point.WAITING, Action.RECLAIM)) == 4
