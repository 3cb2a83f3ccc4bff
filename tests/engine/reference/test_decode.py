"""The fluid decode clock against a naive simulation, and its rules by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.reference.decode import Curve, DecodeClock

CURVE = Curve(base=0.01, per_request=0.001, prefill_rate=1000.0)


def finished(clock: DecodeClock, until: float) -> dict[str, float]:
    """When requests end, by key."""
    return {gain.key: gain.at for gain in clock.advance(until) if gain.done}


def test_decoding_slows_down_with_concurrency() -> None:
    """The whole effect of lending rests on this curve."""
    alone = DecodeClock(CURVE)
    alone.add("a", 0, 100, 0.0)
    assert finished(alone, 100.0)["a"] == pytest.approx(100 * 0.011)
    crowd = DecodeClock(CURVE)
    for number in range(10):
        crowd.add(str(number), 0, 100, 0.0)
    ends = finished(crowd, 100.0)
    assert ends == pytest.approx(dict.fromkeys(ends, 100 * 0.02))
    assert len(ends) == 10


def test_the_default_curve_is_the_calibrated_one() -> None:
    """0.00975 + 0.000078 b seconds per iteration, fitted to the published run."""
    assert Curve().seconds_per_token(64) == pytest.approx(0.00975 + 0.000078 * 64)
    assert Curve().prefill_rate == 60_000.0


def test_prompts_are_prefilled_one_after_the_other() -> None:
    """Moved prefixes cost time, which the switch has to earn back."""
    clock = DecodeClock(CURVE)
    clock.add("a", 500, 1, 0.0)
    clock.add("b", 1000, 1, 0.0)
    ends = finished(clock, 10.0)
    assert ends["a"] == pytest.approx(0.5 + 0.011)
    assert ends["b"] == pytest.approx(1.5 + 0.011)
    assert clock.prefilled_tokens == 1500
    assert clock.prefill_seconds == pytest.approx(1.5)


@given(
    arrivals=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 400), st.integers(1, 300)), min_size=1, max_size=8),
    looks=st.lists(st.floats(0, 60), max_size=6),
)
def test_looking_often_or_late_changes_nothing(arrivals: list[tuple[float, int, int]], looks: list[float]) -> None:
    """A loop that wakes late must not make requests slower, nor one that wakes often faster."""

    def run(moments: list[float]) -> dict[str, float]:
        clock = DecodeClock(CURVE)
        ends: dict[str, float] = {}
        events = sorted([(at, str(i), context, wanted) for i, (at, context, wanted) in enumerate(arrivals)])
        for at, key, context, wanted in events:
            for moment in [m for m in moments if m <= at]:
                ends |= finished(clock, moment)
            moments = [m for m in moments if m > at]
            ends |= {gain.key: gain.at for gain in clock.add(key, context, wanted, at) if gain.done}
        for moment in moments:
            ends |= finished(clock, moment)
        return ends | finished(clock, 1e6)

    often, once = run(sorted(looks)), run([])
    assert often.keys() == once.keys()
    for key, at in once.items():
        assert often[key] == pytest.approx(at, abs=1e-6)


@given(wanted=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_against_a_simulation_step_by_step(wanted: list[int]) -> None:
    """The heap of virtual time must agree with counting tokens one by one."""
    clock = DecodeClock(CURVE)
    for number, tokens in enumerate(wanted):
        clock.add(str(number), 0, tokens, 0.0)
    ends = finished(clock, 1e6)
    now, left = 0.0, dict(enumerate(wanted))
    while left:
        now += CURVE.seconds_per_token(len(left))
        left = {key: tokens - 1 for key, tokens in left.items()}
        for key in [key for key, tokens in left.items() if not tokens]:
            del left[key]
            assert ends[str(key)] == pytest.approx(now)


def test_frozen_requests_make_no_progress() -> None:
    """Pause in mode keep."""
    clock = DecodeClock(CURVE)
    clock.add("a", 1000, 100, 0.0)
    clock.advance(1.55)
    clock.freeze(1.55)
    assert clock.next_time() == math.inf
    assert clock.tokens() == {"a": 50}
    clock.advance(50.0)
    assert clock.tokens() == {"a": 50}
    clock.thaw(50.0)
    assert finished(clock, 100.0)["a"] == pytest.approx(50.0 + 0.55)


def test_recomputing_costs_a_prefill_and_keeps_the_tokens() -> None:
    """A cleared cache under running requests."""
    clock = DecodeClock(CURVE)
    clock.add("a", 100, 100, 0.0)
    clock.add("b", 10_000, 1, 0.0)
    clock.advance(0.1 + 0.55)
    assert clock.tokens()["a"] == 50
    clock.recompute(0.65)
    assert (clock.running, clock.waiting) == (0, 2)
    ends = finished(clock, 100.0)
    assert ends["a"] == pytest.approx(0.65 + 0.15 + 0.55, abs=1e-3)
    assert clock.prefilled_tokens == 100 + 150 + 10_000


def test_removal_gives_the_tokens_so_far() -> None:
    """Partial output is kept on an abort, at whatever stage."""
    clock = DecodeClock(CURVE)
    clock.add("a", 0, 100, 0.0)
    clock.add("b", 5000, 100, 0.0)
    clock.add("c", 1000, 1, 0.0)
    assert clock.remove("a", 0.55)[1] == 50
    assert clock.remove("b", 0.55)[1] == 0
    assert finished(clock, 10.0)["c"] == pytest.approx(0.55 + 1.0 + 0.011)
    assert clock.remove("unknown", 10.0) == ([], 0)
    assert clock.decoded_tokens == 51


def test_deltas_come_when_both_limits_are_reached() -> None:
    """More messages than asked for would cost the controller its speed."""
    clock = DecodeClock(CURVE)
    clock.add("a", 0, 100, 0.0, delta_tokens=10, delta_interval=0.0)
    assert [gain.tokens for gain in clock.advance(10.0)] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    slow = DecodeClock(CURVE)
    slow.add("a", 0, 100, 0.0, delta_tokens=10, delta_interval=0.5)
    gains = slow.advance(10.0)
    assert [(gain.tokens, gain.done) for gain in gains] == [(45, False), (90, False), (100, True)]
    assert gains[0].at == pytest.approx(0.5)


def test_a_request_that_ends_while_a_delta_is_due_ends_once() -> None:
    """A timer of a finished request must do nothing."""
    clock = DecodeClock(CURVE)
    clock.add("a", 0, 20, 0.0, delta_tokens=10, delta_interval=5.0)
    assert [(gain.tokens, gain.done) for gain in clock.advance(20.0)] == [(20, True)]
    assert clock.next_time() == math.inf
