"""How a client behaves: value objects, all times in wall seconds.

Invariants: every value is validated when the object is made, so a wrong one is an error at start and not in the middle
of a run; no control call is without a deadline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from turnout.channels import Security


def _positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{owner}.{name} must be a finite number above 0, it is {value}")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of calls."""

    call: float = 30.0
    """A control call with all its attempts."""
    attempt: float = 15.0
    """One attempt of a control call, so that a peer that accepts and stays silent is found out."""
    transition: float = 600.0
    """A call that answers when GPUs have moved or memory was refilled, with all its attempts."""
    transfer: float = 600.0
    """A call that carries a payload or weights."""
    grace: float = 5.0
    """How much later than its max_wait a wait's deadline is: time for the answer to travel."""
    outage: float = 600.0
    """How long a wait or watch goes on while the service is away before it gives up."""

    def __post_init__(self) -> None:
        _positive(
            "Timeouts",
            call=self.call,
            attempt=self.attempt,
            transition=self.transition,
            transfer=self.transfer,
            grace=self.grace,
            outage=self.outage,
        )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses between attempts: exponential, bounded, spread so that many clients do not come back at once."""

    initial: float = 0.1
    """Pause after the first failure."""
    multiplier: float = 2.0
    """Growth per failure, at least 1."""
    maximum: float = 2.0
    """Longest pause. A client is back within it after a service returns."""
    jitter: float = 0.5
    """Share of a pause that is random, 0 to 1: the pause is drawn from [(1 - jitter) x pause, pause]."""
    max_attempts: int | None = None
    """Attempts of a control call in total; 1 means no retry. None: as many as its deadline allows."""

    def __post_init__(self) -> None:
        _positive("RetryPolicy", initial=self.initial, maximum=self.maximum)
        if not (math.isfinite(self.multiplier) and self.multiplier >= 1):
            raise ValueError(f"RetryPolicy.multiplier must be at least 1, it is {self.multiplier}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"RetryPolicy.jitter must be within 0 and 1, it is {self.jitter}")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"RetryPolicy.max_attempts must be at least 1, it is {self.max_attempts}")


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How soon a peer that went away without a word is noticed."""

    interval: float = 4.0
    """Silence after which a connection with a call on it is pinged; the strictest proxies cut after 5 s."""
    timeout: float = 5.0
    """Time for the answer to a ping."""

    def __post_init__(self) -> None:
        _positive("Keepalive", interval=self.interval, timeout=self.timeout)
        if self.interval < 1:
            raise ValueError(f"Keepalive.interval must be at least 1, it is {self.interval}: gRPC pings no faster")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Everything that shapes a client."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    """Deadlines."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Pauses between attempts."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    """Finding half-open connections."""
    max_message_bytes: int = 256 * 1024 * 1024
    """Largest message, both ways. Above the services' own default of 64 MiB, so that theirs is the one that counts."""
    security: Security = field(default_factory=Security.from_environment)
    """TLS and the token; as the TURNOUT_ variables of the environment say, unless given."""

    def __post_init__(self) -> None:
        if not 0 < self.max_message_bytes < 2**31:
            raise ValueError(f"max_message_bytes must be within 1 and 2**31 - 1, it is {self.max_message_bytes}")
