"""One engine replica as a fluid: all its requests decode at one common speed, piecewise constant in time.

Invariants: `progress` is the tokens that a request present all along would have, so a request is a fixed point on that
axis (its end) and nothing is touched per token; prefill and decoding exclude each other; a replica that is not serving
holds its requests and changes none.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf

from services.simulator.workload import Engine

Moved = tuple[float, int, float]
"""A request between replicas: tokens still to decode, request id, tokens to prefill where it goes."""


class Replica:
    """`ends` is a heap of (progress at which the request is complete, request id)."""

    __slots__ = (
        "_backlog_s",
        "_engine",
        "_ready_at",
        "_slowness",
        "_time",
        "decoded",
        "ends",
        "hybrid",
        "name",
        "next_at",
        "prefill_s",
        "prefilled",
        "progress",
        "serving",
    )

    def __init__(self, name: str, hybrid: bool, engine: Engine) -> None:
        self.name = name
        self.hybrid = hybrid
        self.serving = False
        self.ends: list[tuple[float, int]] = []
        self.progress = 0.0
        self.decoded = 0.0
        self.prefilled = 0.0
        self.prefill_s = 0.0
        self.next_at = inf
        """When its next request completes if nothing changes."""
        self._engine = engine
        self._slowness = 1.0
        self._time = 0.0
        self._ready_at = 0.0
        self._backlog_s = 0.0

    def copy(self) -> Replica:
        """An independent replica in the same state."""
        other = Replica(self.name, self.hybrid, self._engine)
        for field in self.__slots__:
            setattr(other, field, getattr(self, field))
        other.ends = self.ends.copy()
        return other

    def advance(self, now: float) -> None:
        """Decode until `now`, which is not later than `next_at`."""
        ends = self.ends
        if self.serving and ends:
            start = self._ready_at if self._ready_at > self._time else self._time
            if now > start:
                gained = (now - start) / self._token_s()
                self.progress += gained
                self.decoded += gained * len(ends)
        self._time = now

    def pop(self) -> int:
        """Remove the request that completes at `next_at`, to which the replica has advanced, and return its id."""
        end, request = heapq.heappop(self.ends)
        self.progress = max(self.progress, end)
        self._plan()
        return request

    def add(self, requests: Iterable[Moved], now: float) -> None:
        """Take requests over. They are prefilled first; meanwhile nothing here decodes."""
        self.advance(now)
        tokens = 0.0
        for remaining, request, prefix in requests:
            heapq.heappush(self.ends, (self.progress + remaining, request))
            tokens += prefix
        seconds = tokens / self._engine.prefill_tokens_per_s
        self.prefilled += tokens
        self.prefill_s += seconds
        if self.serving:
            self._ready_at = max(self._ready_at, now) + seconds
        else:
            self._backlog_s += seconds
        self._plan()

    def take(self, now: float) -> list[tuple[float, int]]:
        """Stop serving and give all requests away, as (tokens still to decode, request id)."""
        self.advance(now)
        taken = [(max(end - self.progress, 0.0), request) for end, request in self.ends]
        self.ends = []
        self.serving = False
        self._backlog_s = 0.0
        self._plan()
        return taken

    def serve(self, now: float) -> None:
        """Begin (or go on) to serve what it holds."""
        if not self.serving:
            self.advance(now)
            self.serving = True
            self._ready_at = now + self._backlog_s
            self._backlog_s = 0.0
            self._plan()

    def set_speed(self, factor: float, now: float) -> None:
        """Decode `factor` times as fast as the curve says from now on."""
        self.advance(now)
        self._slowness = 1.0 / factor
        self._plan()

    def _token_s(self) -> float:
        return (self._engine.base_s + self._engine.per_request_s * len(self.ends)) * self._slowness

    def _plan(self) -> None:
        if self.serving and self.ends:
            left = max(self.ends[0][0] - self.progress, 0.0)
            self.next_at = max(self._time, self._ready_at) + left * self._token_s()
        else:
            self.next_at = inf
