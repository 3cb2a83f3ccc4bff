"""How fast engines decode and prefill, learned from their counters.

s(b), seconds per token and request at b running requests, is base + slope x b; the shape is remembered for long, its
scale follows the last windows, since engines slow down and speed up as a whole.

Invariants: s(b) is positive and does not fall with b; a window in which GPUs or weights moved teaches nothing about
decoding. A move is told when it is over, so a window is held back for as long as one may have been under way: until
something shows that none was.
"""

from collections import deque
from dataclasses import dataclass, field

from services.scheduler.policies.types import Pool, ReplicaCounters

# Shorter windows count too few tokens to say anything.
_WINDOW_S = 10.0
# Share of what older windows say of the shape that is left after one more: some 300 count, about three steps.
_SHAPE_KEEP = 0.997
# Share of the old scale that is left after one window of a pool.
_SCALE_KEEP = 0.6
# Before any window: a large model on 4 GPUs; only the shape of this lasts, until other shapes are measured.
_BASE_S, _SLOPE_S = 0.01, 0.00008
# How many windows the first guess of the shape counts for.
_GUESS_WINDOWS = 1.0
_GUESS_PREFILL = 60_000.0
# No engine is slower or faster.
_SLOWEST_PREFILL, _FASTEST_PREFILL = 1_000.0, 1_000_000.0
_PATIENCE = 1.2
_PREFILL_KEEP = 0.6
# A replica whose decoding explains this share of a window has done with prefill.
_BACK = 0.9
# So long after a move a slow window is not believed where prefill is not reported.
_DISTRUST_S = 60.0
# Shorter stalls drown in the spacing of the readings.
_VISIBLE_S = 1.5


@dataclass(slots=True)
class _Reading:
    at: float
    decoded: int
    running: int


@dataclass(frozen=True, slots=True)
class _Window:
    """Ended at `at`, with so many running and so many seconds per token."""

    at: float
    running: float
    token_s: float


@dataclass(slots=True)
class _Stall:
    since: float
    tokens: float
    replicas: int
    first: dict[str, ReplicaCounters] = field(default_factory=dict)
    last: dict[str, ReplicaCounters] = field(default_factory=dict)
    missing: dict[str, float] = field(default_factory=dict)


class SpeedModel:
    """Feed it counters, and tell it when something moved."""

    def __init__(self) -> None:
        self._last: dict[str, _Reading] = {}
        self._sums: tuple[float, ...] = (0.0,) * 5
        self._quiet_from = 0.0
        self._moved_at = 0.0
        self._scale = 1.0
        self._base, self._slope = _BASE_S, _SLOPE_S
        self._prefill: dict[str, float] = {}
        self._learned: float | None = None
        self._held: deque[_Window] = deque()
        self.hold_s = 0.0
        """Seconds for which a window is held back: GPUs may be on their way home, unannounced."""
        self._stall: _Stall | None = None

    @property
    def measured(self) -> bool:
        """Whether decoding was ever measured."""
        return self._sums[0] > 0

    @property
    def prefill(self) -> float:
        """Prefill tokens per second of one replica."""
        if self._prefill:
            return sum(self._prefill.values()) / len(self._prefill)
        return _GUESS_PREFILL if self._learned is None else self._learned

    @property
    def line(self) -> tuple[float, float]:
        """(base, slope) of s(b) as engines are now."""
        return self._base * self._scale, self._slope * self._scale

    def token_s(self, running: float) -> float:
        """s(running)."""
        base, slope = self.line
        return base + slope * running

    def moved(self, at: float, tokens: float, since: float | None = None) -> None:
        """GPUs, weights or requests moved, from `since` (None: all at once) to `at`; a replica has about `tokens` to
        prefill again."""
        self._release(at if since is None else since)
        self._held.clear()
        self._quiet_from = max(self._quiet_from, at + _PATIENCE * tokens / self.prefill)
        self._moved_at = at
        self._last.clear()
        self._stall = None

    def undisturbed(self, at: float) -> None:
        """No reclaim is under way at `at`, so no window that ended before was in one."""
        self._release(at)

    def prefilling(self, since: float, tokens: float, replicas: int) -> None:
        """From `since` on `replicas` standalone ones prefill `tokens` together; call it after `moved`."""
        if tokens > 0 and self.measured:
            self._stall = _Stall(since, tokens, replicas)

    def counters(self, event: ReplicaCounters) -> None:
        """A reading of one replica."""
        if event.prefill_tokens_per_s is not None and event.prefill_tokens_per_s > 0:
            self._prefill[event.replica] = event.prefill_tokens_per_s
        elif self._stall is not None and event.pool is Pool.STANDALONE:
            self._watch_stall(self._stall, event)
        last = self._last.get(event.replica)
        self._release(event.at - self.hold_s)
        if event.at < self._quiet_from:
            return
        if last is None or event.decoded_tokens < last.decoded:
            self._last[event.replica] = _Reading(event.at, event.decoded_tokens, event.running_requests)
            return
        took = event.at - last.at
        if took < _WINDOW_S * 0.99:
            return
        self._last[event.replica] = _Reading(event.at, event.decoded_tokens, event.running_requests)
        running, tokens = (last.running + event.running_requests) / 2, event.decoded_tokens - last.decoded
        if self._looks_stalled(event.at, took, tokens, running):
            return
        if running >= 1 and tokens > 0 and abs(last.running - event.running_requests) <= 0.3 * running:
            self._held.append(_Window(event.at, running, took * running / tokens))
            self._release(event.at - self.hold_s)

    def _watch_stall(self, stall: _Stall, event: ReplicaCounters) -> None:
        """Time in which a replica decoded nothing after a reclaim is time in which it prefilled."""
        first = stall.first.setdefault(event.replica, event)
        last = stall.last.get(event.replica, first)
        stall.last[event.replica] = event
        if first is event or event.replica in stall.missing or event.running_requests < 1:
            return
        if self._decoding(last, event) < _BACK * (event.at - last.at):
            return
        missing = event.at - first.at - self._decoding(first, event)
        # What passed before the first reading was prefill as well, if there was any to see.
        stall.missing[event.replica] = missing + (first.at - stall.since if missing > _VISIBLE_S else 0.0)
        if len(stall.missing) < stall.replicas:
            return
        self._stall = None
        total = sum(stall.missing.values())
        if total > 2 * _VISIBLE_S * stall.replicas:
            seen = min(max(stall.tokens / total, _SLOWEST_PREFILL), _FASTEST_PREFILL)
            known = self._learned
            self._learned = seen if known is None else known**_PREFILL_KEEP * seen ** (1 - _PREFILL_KEEP)

    def _looks_stalled(self, at: float, took: float, tokens: int, running: float) -> bool:
        """Whether a slow window soon after a move is rather prefill than slow decoding, where no rate is reported."""
        prefilling = self._stall is not None or at < self._moved_at + _DISTRUST_S
        if self._prefill or not self.measured or not prefilling:
            return False
        return tokens * self.token_s(running) < _BACK * took * running

    def _decoding(self, first: ReplicaCounters, last: ReplicaCounters) -> float:
        """Seconds between two readings that decoding explains."""
        running = max((first.running_requests + last.running_requests) / 2, 1.0)
        return (last.decoded_tokens - first.decoded_tokens) * self.token_s(running) / running

    def _release(self, until: float) -> None:
        """Learn from the windows that ended by then."""
        while self._held and self._held[0].at <= until:
            window = self._held.popleft()
            self._learn(window.running, window.token_s)

    def _learn(self, running: float, token_s: float) -> None:
        expected = self._base + self._slope * running
        first = not self.measured
        sums = (1.0, running, token_s, running * running, running * token_s)
        self._sums = tuple(old * _SHAPE_KEEP + new for old, new in zip(self._sums, sums, strict=True))
        self._refit()
        self._scale = 1.0 if first else self._scale * _SCALE_KEEP + token_s / expected * (1 - _SCALE_KEEP)

    def _refit(self) -> None:
        """Least squares over all windows, with the first guess of the shape as a few more around the mean of them."""
        count, sum_b, sum_s, sum_bb, sum_bs = self._sums
        mean_b, mean_s = sum_b / count, sum_s / count
        guess = mean_s / (_BASE_S + _SLOPE_S * mean_b)
        weight = _GUESS_WINDOWS * mean_b**2 / 4
        slope = (sum_bs - sum_b * mean_s + weight * guess * _SLOPE_S) / (sum_bb - sum_b * mean_b + weight)
        # A line through the mean that neither falls nor has a negative base.
        self._slope = min(max(slope, 0.0), 0.98 * mean_s / mean_b)
        self._base = mean_s - self._slope * mean_b
