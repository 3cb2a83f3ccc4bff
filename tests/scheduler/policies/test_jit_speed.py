"""Engine speeds learned from counters."""

import math

import pytest

from services.scheduler.policies.jit.speed import SpeedModel
from services.scheduler.policies.types import Pool, ReplicaCounters


class Engines:
    """Replicas that decode exactly by s(b) = base + slope x b, read every ten seconds."""

    def __init__(
        self, model: SpeedModel, base: float = 0.01, slope: float = 0.0001, prefill: float | None = 50_000
    ) -> None:
        self.model, self.base, self.slope, self.prefill = model, base, slope, prefill
        self.now = 0.0
        self.decoded: dict[str, float] = {}

    def run(self, seconds: float, stalled_s: float = 0.0, **running: int) -> None:
        end = self.now + seconds
        stall_until = self.now + stalled_s
        self._report(running)
        while self.now < end:
            self.now += 10.0
            for name, count in running.items():
                decoding = min(10.0, max(self.now - stall_until, 0.0))
                self.decoded[name] = self.decoded.get(name, 0.0) + count * decoding / (self.base + self.slope * count)
            self._report(running)

    def _report(self, running: dict[str, int]) -> None:
        for name, count in running.items():
            self.model.counters(
                ReplicaCounters(
                    at=self.now,
                    replica=name,
                    pool=Pool.STANDALONE,
                    decoded_tokens=int(self.decoded.get(name, 0.0)),
                    running_requests=count,
                    prefill_tokens_per_s=self.prefill,
                )
            )


def test_the_curve_is_found_from_two_loads() -> None:
    """The speed at a load never seen decides what a lend is worth."""
    model = SpeedModel()
    engines = Engines(model)
    engines.run(200, a=50, b=250)
    assert model.token_s(50) == pytest.approx(0.015, rel=0.02)
    assert model.token_s(250) == pytest.approx(0.035, rel=0.02)
    assert model.token_s(120) == pytest.approx(0.022, rel=0.03)
    assert model.prefill == 50_000


def test_one_load_alone_keeps_the_guessed_shape() -> None:
    """Nothing can be divided by no spread."""
    model = SpeedModel()
    Engines(model).run(100, a=100)
    assert model.token_s(100) == pytest.approx(0.02, rel=0.01)
    assert model.token_s(10) < model.token_s(100) < model.token_s(300)


def test_engines_that_slow_down_are_followed_within_a_minute() -> None:
    """Predictions by yesterday's speed reclaim too early."""
    model = SpeedModel()
    engines = Engines(model)
    engines.run(400, a=50, b=250)
    engines.base, engines.slope = 0.015, 0.00015
    engines.run(60, a=50, b=250)
    assert model.token_s(100) == pytest.approx(0.030, rel=0.1)


def test_windows_in_which_something_moved_teach_nothing() -> None:
    """A replica that prefills decodes nothing: taken for slow decoding, it would spoil the curve."""
    model = SpeedModel()
    engines = Engines(model)
    engines.run(200, a=50, b=250)
    before = model.line
    model.moved(engines.now, tokens=50_000 * 30)
    engines.run(30, stalled_s=30, a=50, b=250)
    assert model.line == before


def test_a_reclaim_that_is_told_when_it_is_over_teaches_nothing() -> None:
    """While a slow reclaim is under way standalone replicas prefill what moved: taken for slow decoding at a high load,
    that made every lend look worth twice what it was."""
    model = SpeedModel()
    engines = Engines(model)
    engines.run(200, a=50, b=250)
    before = model.line
    model.hold_s = 30.0
    began = engines.now
    engines.run(20, stalled_s=20, a=50, b=250)
    model.moved(engines.now, tokens=50_000 * 20, since=began)
    assert model.line == before


def test_what_ended_before_a_reclaim_began_is_learned_from_it() -> None:
    """Windows held back for ever would hide that engines slowed down while GPUs were lent."""
    model = SpeedModel()
    engines = Engines(model)
    engines.run(400, a=50, b=250)
    model.hold_s = 1_000.0
    engines.base, engines.slope = 0.015, 0.00015
    engines.run(60, a=50, b=250)
    assert model.token_s(100) == pytest.approx(0.020, rel=0.05)
    model.moved(engines.now + 5, tokens=0, since=engines.now)
    assert model.token_s(100) == pytest.approx(0.030, rel=0.1)


def test_what_ended_before_the_gpus_were_seen_lent_is_learned_then() -> None:
    """Until the first reclaim was over, all decisions of the first lend rested on the guess of another model."""
    model = SpeedModel()
    engines = Engines(model)
    model.hold_s = math.inf
    engines.base, engines.slope = 0.015, 0.00015
    engines.run(60, a=50, b=250)
    assert not model.measured
    model.undisturbed(engines.now)
    before = model.line
    assert model.token_s(100) == pytest.approx(0.030, rel=0.1)
    engines.run(20, stalled_s=20, a=50, b=250)
    model.moved(engines.now, tokens=50_000 * 20, since=engines.now - 20)
    assert model.line == before, "what came after it may have been a reclaim, and was one"


def test_prefill_is_learned_from_stalls_where_it_is_not_reported() -> None:
    """Moved tokens at four times the guessed price cost more than most lends gain."""
    model = SpeedModel()
    engines = Engines(model, prefill=None)
    engines.run(200, a=50, b=250)
    assert model.prefill == 60_000
    for _ in range(4):
        model.moved(engines.now, tokens=750_000)
        model.prefilling(engines.now, tokens=2 * 15_000 * 50, replicas=2)
        engines.run(120, stalled_s=50, a=50, b=250)
    assert model.prefill == pytest.approx(15_000, rel=0.1)
    assert model.token_s(250) == pytest.approx(0.035, rel=0.05)


def test_a_counter_that_starts_again_is_a_new_engine() -> None:
    """A restarted replica counts from zero: a negative number of tokens teaches nothing."""
    model = SpeedModel()
    engines = Engines(model)
    engines.run(100, a=100)
    before = model.line
    engines.decoded.clear()
    engines.run(10, a=100)
    engines.run(50, a=100)
    assert model.line == pytest.approx(before, rel=0.01)
