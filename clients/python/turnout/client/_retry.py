"""When to try again: pure state machines, told the time and handed their randomness.

Invariants: the sum of all attempts and pauses stays within the total; no pause is longer than the policy's maximum
unless the service asked for it. Who gives up does so with the last error, which says why the service was not reached.
"""

from __future__ import annotations

import random
from typing import Final

from turnout.client._options import RetryPolicy

_ALIVE_S: Final = 60.0
"""A call that lasted this long had a peer: gRPC gives up connecting after 20 s, and keepalive finds dead peers soon."""


class Backoff:
    """Pauses that grow from failure to failure and start again after a success."""

    def __init__(self, policy: RetryPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._pause = policy.initial

    def next(self) -> float:
        """Return the next pause, in seconds."""
        pause = min(self._pause, self._policy.maximum)
        self._pause = min(self._pause * self._policy.multiplier, self._policy.maximum)
        return pause * (1 - self._policy.jitter * self._rng.random())

    def reset(self) -> None:
        """Start again: something succeeded."""
        self._pause = self._policy.initial


class Attempts:
    """The attempts of one control call."""

    def __init__(self, policy: RetryPolicy, rng: random.Random, *, now: float, total: float, attempt: float) -> None:
        self._backoff = Backoff(policy, rng)
        self._left = policy.max_attempts
        self._end = now + total
        self._attempt = attempt

    def timeout(self, now: float) -> float:
        """Return the deadline of the attempt that begins now, in seconds from now."""
        return max(0.0, min(self._attempt, self._end - now))

    def pause(self, now: float, at_least: float | None = None) -> float | None:
        """Return how long to wait after a retryable failure; None to give up.

        `at_least`: what the service asked for.
        """
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                return None
        pause = max(self._backoff.next(), at_least or 0.0)
        return pause if now + pause < self._end else None


class Outage:
    """The attempts of a wait or watch: unlimited while the service is there, bounded while it is not.

    It is there while it sends something, and while a call lasts: a quiet wait is no outage.
    """

    def __init__(self, policy: RetryPolicy, rng: random.Random, *, now: float, limit: float) -> None:
        self._backoff = Backoff(policy, rng)
        self._limit = limit
        self._began_at = self._heard_at = now

    def began(self, now: float) -> None:
        """A call begins."""
        self._began_at = now

    def heard(self, now: float) -> None:
        """The service sent something."""
        self._heard_at = now
        self._backoff.reset()

    def pause(self, now: float, at_least: float | None = None) -> float | None:
        """Return how long to wait before the next call, now that one has ended; None to give up.

        `at_least`: what the service asked for.
        """
        if now - self._began_at >= _ALIVE_S:
            self.heard(now)
        pause = max(self._backoff.next(), at_least or 0.0)
        return pause if now + pause < self._heard_at + self._limit else None
