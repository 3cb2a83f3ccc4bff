"""How often a run may ask."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.buffer.domain.caps import Caps
from services.buffer.domain.config import RunConfig
from services.buffer.domain.rate import RequestRate
from services.runtime.errors import TurnoutError


@given(
    rate=st.floats(0.1, 1000.0),
    gaps=st.lists(st.floats(0.0, 5.0), max_size=200),
)
def test_no_span_of_time_lets_more_through_than_its_share(rate: float, gaps: list[float]) -> None:
    """A bucket that refills too fast, or after a refusal, is no bound."""
    bucket, now, passed = RequestRate(), 100.0, []
    for gap in gaps:
        now += gap
        if bucket.ask(rate, now) == 0.0:
            passed.append(now)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            assert last - first + 1 <= rate * (passed[last] - passed[first]) + max(1.0, rate) + 1e-6


@given(rate=st.floats(0.1, 1000.0), asked=st.integers(1, 3000))
def test_who_comes_back_when_told_passes(rate: float, asked: int) -> None:
    """A retry-after that is too short makes clients knock twice, one that is too long wastes their share."""
    bucket = RequestRate()
    waits = [bucket.ask(rate, 50.0) for _ in range(asked)]
    assert sum(wait == 0.0 for wait in waits) == min(asked, math.floor(max(1.0, rate) + 1e-9))
    refused = [wait for wait in waits if wait]
    if refused:
        assert len(set(refused)) == 1, "a refused request takes nothing"
        assert bucket.ask(rate, 50.0 + refused[0] * 0.98) > 0.0
        assert bucket.ask(rate, 50.0 + refused[0] + 1e-6) == 0.0


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = RequestRate()
    assert bucket.ask(1.0, 10.0) == 0.0
    assert bucket.ask(1.0, 10.0) > 0.0
    assert bucket.ask(1.0, 5.0) > 0.0
    assert bucket.ask(1.0, 10.5) > 0.0
    assert bucket.ask(1.0, 11.0) == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(TurnoutError) as caught:
        RunConfig(caps=Caps(max_request_rate=rate)).validate()
    assert caught.value.metadata["field"] == "config.caps.max_request_rate"
