"""How fast requests decode: a fluid model of continuous batching.

Invariants: with b running requests every one gains one token per `base + per_request * b` seconds; prompts are
prefilled one after the other beside the decoding; progress between two membership changes is linear, so time is
advanced from event to event and nothing ticks per token; a late `advance` gives the same result as one in time. All
times are domain seconds, handed in.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

EPSILON: Final = 1e-4
"""Tokens: far above what sums of floats lose (times count from the engine's start), far below one token."""

PREFILL_EPSILON: Final = 1e-7
"""Seconds of prefill, likewise: a hundredth of a token."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Speed of a replica. The defaults are fitted to a published run (Qwen3.5-35B-A3B, tensor parallel 4, H100)."""

    base: float = 0.00975
    per_request: float = 0.000078
    prefill_rate: float = 60_000.0

    def seconds_per_token(self, running: int) -> float:
        """Seconds per decode iteration with `running` requests."""
        return self.base + self.per_request * running


@dataclass(frozen=True, slots=True)
class Gain:
    """A request has `tokens` since it was added, at time `at`; `done` when it has all it wanted."""

    key: str
    at: float
    tokens: int
    done: bool


@dataclass(slots=True)
class _Item:
    key: str
    context: int
    wanted: int
    delta_tokens: int
    delta_interval: float
    told_at: float
    tokens: int = 0
    joined: float = 0.0
    decoding: bool = False
    end_marked: bool = False


class DecodeClock:
    """Requests of one replica and how far they are."""

    def __init__(self, curve: Curve, now: float = 0.0) -> None:
        self._curve = curve
        self._now = now
        self._level = 0.0
        self._items: dict[str, _Item] = {}
        self._decoding = 0
        self._queue: deque[_Item] = deque()
        self._prefill_left = 0.0
        self._marks: list[tuple[float, int, _Item]] = []
        self._due: list[tuple[float, int, _Item]] = []
        self._order = itertools.count()
        self._frozen = False
        self._settled_tokens = 0
        self.prefilled_tokens = 0
        self.prefill_seconds = 0.0

    # ------------------------------------------------------------------------------------------------------- changes

    def add(
        self, key: str, context: int, wanted: int, now: float, delta_tokens: int = 0, delta_interval: float = 0.0
    ) -> list[Gain]:
        """Prefill `context` tokens, then decode `wanted`; `delta_tokens` 0 tells nothing before the end."""
        gains = self.advance(now)
        item = _Item(key, context, wanted, delta_tokens, delta_interval, now)
        self._items[key] = item
        self._enqueue(item)
        return gains

    def remove(self, key: str, now: float) -> tuple[list[Gain], int]:
        """Take a request out; the second value is its tokens so far."""
        gains = self.advance(now)
        item = self._items.get(key)
        if item is None:
            return gains, next((gain.tokens for gain in gains if gain.key == key and gain.done), 0)
        tokens = self._tokens(item)
        self._drop(item, tokens)
        return gains, tokens

    def freeze(self, now: float) -> list[Gain]:
        """Stop everything where it is."""
        gains = self.advance(now)
        self._frozen = True
        return gains

    def thaw(self, now: float) -> list[Gain]:
        """Go on."""
        gains = self.advance(now)
        self._frozen = False
        return gains

    def recompute(self, now: float) -> list[Gain]:
        """All KV is gone: every request keeps its tokens and is prefilled again."""
        gains = self.advance(now)
        items = [item for item in self._items.values() if item.decoding]
        for item in items:
            item.tokens = self._tokens(item)
            item.decoding = item.end_marked = False
        self._decoding = 0
        self._marks.clear()
        self._due.clear()
        # A prompt whose prefill had begun starts again.
        waiting, self._queue = list(self._queue), deque()
        for item in (*items, *waiting):
            self._enqueue(item)
        return gains

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def running(self) -> int:
        """Requests that decode."""
        return self._decoding

    @property
    def waiting(self) -> int:
        """Requests that are or wait to be prefilled."""
        return len(self._items) - self._decoding

    def tokens(self) -> dict[str, int]:
        """Tokens since it was added, by request, as of the last advance."""
        return {key: self._tokens(item) for key, item in self._items.items()}

    @property
    def decoded_tokens(self) -> int:
        """Tokens decoded in all, as of the last advance."""
        return self._settled_tokens + sum(self._tokens(item) for item in self._items.values())

    def next_time(self) -> float:
        """When something will happen next; infinity if nothing will."""
        if self._frozen:
            return math.inf
        times = [self._next_mark(), self._next_due()]
        if self._queue:
            times.append(self._now + self._prefill_left)
        return min(times)

    def advance(self, now: float) -> list[Gain]:
        """Let time pass until `now`; what happened meanwhile, in order."""
        gains: list[Gain] = []
        while (at := self.next_time()) <= now:
            self._flow(max(at, self._now))
            self._happen(gains)
        self._flow(max(now, self._now))
        return gains

    # --------------------------------------------------------------------------------------------------------- inside

    def _flow(self, to: float) -> None:
        passed = to - self._now
        if passed > 0 and not self._frozen:
            if self._decoding:
                self._level += passed / self._curve.seconds_per_token(self._decoding)
            if self._queue:
                worked = min(passed, self._prefill_left)
                self._prefill_left -= worked
                self.prefill_seconds += worked
        self._now = to

    def _happen(self, gains: list[Gain]) -> None:
        if self._queue and self._prefill_left <= PREFILL_EPSILON:
            item = self._queue.popleft()
            self.prefilled_tokens += item.context + item.tokens
            self._start_prefill()
            self._join(item)
        if self._next_mark() < math.inf and self._marks[0][0] <= self._level + EPSILON:
            _, _, item = heapq.heappop(self._marks)
            self._reach(item, gains)
        while self._due and (not self._due[0][2].decoding or self._due[0][0] <= self._now):
            _, _, item = heapq.heappop(self._due)
            if item.decoding:
                self._tell(item, gains)

    def _reach(self, item: _Item, gains: list[Gain]) -> None:
        if self._tokens(item) >= item.wanted:
            self._drop(item, item.wanted)
            gains.append(Gain(item.key, self._now, item.wanted, True))
        elif self._now >= item.told_at + item.delta_interval:
            self._tell(item, gains)
        else:
            self._mark(item, item.wanted)
            heapq.heappush(self._due, (item.told_at + item.delta_interval, next(self._order), item))

    def _tell(self, item: _Item, gains: list[Gain]) -> None:
        tokens = min(self._tokens(item), item.wanted)
        item.told_at = self._now
        gains.append(Gain(item.key, self._now, tokens, False))
        self._mark(item, min(item.wanted, tokens + item.delta_tokens))

    def _join(self, item: _Item) -> None:
        item.decoding = True
        item.joined = self._level - item.tokens
        self._decoding += 1
        first = item.tokens + item.delta_tokens if item.delta_tokens else item.wanted
        self._mark(item, min(item.wanted, first))

    def _mark(self, item: _Item, tokens: int) -> None:
        if tokens < item.wanted or not item.end_marked:
            heapq.heappush(self._marks, (item.joined + tokens, next(self._order), item))
            item.end_marked = item.end_marked or tokens == item.wanted

    def _enqueue(self, item: _Item) -> None:
        self._queue.append(item)
        if len(self._queue) == 1:
            self._start_prefill()

    def _start_prefill(self) -> None:
        head = self._queue[0] if self._queue else None
        self._prefill_left = (head.context + head.tokens) / self._curve.prefill_rate if head else 0.0

    def _drop(self, item: _Item, tokens: int) -> None:
        del self._items[item.key]
        self._settled_tokens += tokens
        if item.decoding:
            item.decoding = False
            self._decoding -= 1
            if not self._decoding:
                self._level = 0.0
                self._marks.clear()
                self._due.clear()
        elif item in self._queue:
            was_head = self._queue[0] is item
            self._queue.remove(item)
            if was_head:
                self._start_prefill()

    def _tokens(self, item: _Item) -> int:
        if not item.decoding:
            return item.tokens
        return min(item.wanted, math.floor(self._level - item.joined + EPSILON))

    def _next_mark(self) -> float:
        while self._marks and not self._marks[0][2].decoding:
            heapq.heappop(self._marks)
        if not self._marks:
            return math.inf
        missing = max(0.0, self._marks[0][0] - self._level)
        return self._now + missing * self._curve.seconds_per_token(self._decoding)

    def _next_due(self) -> float:
        while self._due and not self._due[0][2].decoding:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf
