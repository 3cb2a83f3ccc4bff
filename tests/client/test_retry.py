"""When to try again: the pure state machines."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.client import ClientOptions, Keepalive, RetryPolicy, Timeouts
from turnout.client._retry import Attempts, Backoff, Outage

NO_JITTER = RetryPolicy(initial=1.0, multiplier=2.0, maximum=5.0, jitter=0.0)


def test_pauses_grow_to_the_maximum_and_start_again_after_a_success() -> None:
    """Without a maximum a client stays away for minutes after a short outage."""
    backoff = Backoff(NO_JITTER, random.Random(0))
    assert [backoff.next() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next() == 1


@given(seed=st.integers(), jitter=st.floats(0, 1))
def test_jitter_only_shortens_a_pause(seed: int, jitter: float) -> None:
    """Pauses above the maximum break the promise of being back within it; negative ones make a hot loop."""
    policy = RetryPolicy(initial=0.1, multiplier=3.0, maximum=2.0, jitter=jitter)
    plain = Backoff(RetryPolicy(initial=0.1, multiplier=3.0, maximum=2.0, jitter=0.0), random.Random(0))
    drawn = Backoff(policy, random.Random(seed))
    for _ in range(8):
        longest, pause = plain.next(), drawn.next()
        assert longest * (1 - jitter) <= pause <= longest


def test_jitter_comes_from_the_given_generator() -> None:
    """Two workers with the same seed are repeatable; with different ones they do not come back together."""

    def pauses(seed: int) -> list[float]:
        backoff = Backoff(RetryPolicy(), random.Random(seed))
        return [backoff.next() for _ in range(4)]

    assert pauses(1) == pauses(1) != pauses(2)


def test_attempts_share_one_total() -> None:
    """A deadline per attempt alone lets a call take attempts x deadline."""
    attempts = Attempts(NO_JITTER, random.Random(0), now=100.0, total=10.0, attempt=4.0)
    assert attempts.timeout(100.0) == 4.0
    assert attempts.pause(104.0) == 1.0
    assert attempts.timeout(105.0) == 4.0
    assert attempts.timeout(107.5) == 2.5
    assert attempts.timeout(111.0) == 0.0


def test_a_pause_that_would_pass_the_total_gives_up_at_once() -> None:
    """Sleeping into a deadline that is lost anyway only delays the error."""
    attempts = Attempts(NO_JITTER, random.Random(0), now=0.0, total=2.0, attempt=1.0)
    assert attempts.pause(0.5) == 1.0
    assert attempts.pause(1.0) is None


@pytest.mark.parametrize(("limit", "pauses"), [(1, 0), (3, 2)])
def test_max_attempts_counts_the_first_one(limit: int, pauses: int) -> None:
    """With max_attempts=1 a command line must fail at once, not after one retry."""
    policy = RetryPolicy(initial=0.1, jitter=0.0, max_attempts=limit)
    attempts = Attempts(policy, random.Random(0), now=0.0, total=100.0, attempt=1.0)
    assert [attempts.pause(0.0) is not None for _ in range(limit)] == [True] * pauses + [False]


def test_an_outage_is_measured_from_the_last_word_of_the_service() -> None:
    """A wait of hours across several restarts must not use up one common budget."""
    outage = Outage(NO_JITTER, random.Random(0), now=0.0, limit=10.0)
    assert outage.pause(8.0) == 1.0
    outage.heard(9.5)
    assert outage.pause(18.0) == 1.0
    assert outage.pause(18.0) is None


def test_a_quiet_wait_is_no_outage() -> None:
    """A watch of hours without news must outlive the restart that ends it, and not give up at the first cut."""
    outage = Outage(NO_JITTER, random.Random(0), now=0.0, limit=10.0)
    outage.began(0.0)
    assert outage.pause(7200.0) == 1.0
    outage.began(7201.0)
    assert outage.pause(7202.0) == 2.0
    outage.began(7204.0)
    assert outage.pause(7209.0) is None


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Timeouts(call=0), "Timeouts.call"),
        (lambda: Timeouts(attempt=float("nan")), "Timeouts.attempt"),
        (lambda: Timeouts(outage=float("inf")), "Timeouts.outage"),
        (lambda: RetryPolicy(multiplier=0.5), "RetryPolicy.multiplier"),
        (lambda: RetryPolicy(jitter=1.5), "RetryPolicy.jitter"),
        (lambda: RetryPolicy(jitter=float("nan")), "RetryPolicy.jitter"),
        (lambda: RetryPolicy(max_attempts=0), "RetryPolicy.max_attempts"),
        (lambda: RetryPolicy(initial=-1), "RetryPolicy.initial"),
        (lambda: Keepalive(interval=0), "Keepalive.interval"),
        (lambda: Keepalive(interval=0.5), "Keepalive.interval"),
        (lambda: Keepalive(timeout=0), "Keepalive.timeout"),
        (lambda: ClientOptions(max_message_bytes=2**31), "max_message_bytes"),
    ],
)
def test_wrong_options_are_refused_by_name_when_they_are_made(make: type[object], named: str) -> None:
    """A NaN deadline that is noticed hours into a run is noticed too late."""
    with pytest.raises(ValueError, match=named):
        make()
