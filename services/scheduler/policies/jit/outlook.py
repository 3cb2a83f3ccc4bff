"""What the rest of a step costs, by when the GPUs come back.

All requests in flight decode at one common speed, so "x more tokens each" is the axis on which groups complete; two
curves map it to time, one for all replicas and one for the standalone ones. Completions are drawn as scenarios, and the
waits of the remaining mini-batches are walked in each.

Invariants: times are seconds from now; the curves rise; nothing here is remembered between two outlooks.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from services.scheduler.policies.jit.lengths import Floats

_POINTS = 72
# Candidates for the moment of reclaim: dense near now, where it is decided, coarse later, where it is only planned.
_CANDIDATES = np.linspace(0.0, 1.0, 20) ** 2
# How far beyond the moment at which the whole step is covered a lend is considered.
_BEYOND = 1.25
# Tokens by which a group that outlived all its scenarios is expected to go on, times the rank of the scenario.
_OVERDUE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known of engines and trainer. base, slope: seconds per token and request. prefill: tokens per second of a
    replica. lend_s, reclaim_s: costs. mini_batch_s: training of one. token_value_s: seconds of a later wait that one
    token saves. stretch: how much longer than predicted arrivals took after a reclaim."""

    hybrids: int
    standalones: int
    base: float
    slope: float
    prefill: float
    lend_s: float
    reclaim_s: float
    mini_batch: int
    mini_batch_s: float
    token_value_s: float
    stretch: float = 1.0


@dataclass(frozen=True, slots=True)
class Prospect:
    """An option in seconds: its cost (time until the step ends, less what its tokens save later), the wait within the
    step, the tokens decoded by the step's end, and for a lend when to take the GPUs back."""

    cost_s: float
    wait_s: float
    tokens: float
    reclaim_in_s: float = 0.0


class Outlook:
    """Scenarios of one moment.

    left: tokens still to come, by unsettled member and scenario, in the order of groups; first: the first member of
    every group; prefix: tokens a member has; hybrid: whether it runs on a hybrid replica.
    """

    def __init__(self, left: Floats, first: np.ndarray, prefix: Floats, hybrid: np.ndarray, setting: Setting) -> None:  # type: ignore[type-arg]
        self._setting = setting
        self._left = left
        self.members = len(left)
        self.mini_batch_s = setting.mini_batch_s
        self._prefix = prefix
        self._hybrid = hybrid
        self.completion = np.maximum.reduceat(left, first, axis=0)
        """Tokens until a group is complete, by group and scenario."""
        order = np.argsort(self.completion, axis=1)
        self._ranks = np.argsort(order, axis=1)
        self._ordered = np.take_along_axis(self.completion, order, axis=1)
        longest = max(float(left.max()), 1.0)
        self._x = np.linspace(0.0, 1.0, _POINTS) ** 2 * longest
        # The first point of the axis that is not below, which the square root finds without a search.
        self._bins = np.ceil(np.sqrt(left * ((_POINTS - 1) ** 2 / longest)) - 1e-9).astype(np.int64).ravel()
        self._running = self._still(np.ones(len(left)))
        self._hybrid_members = self._still(hybrid.astype(np.float64))
        self._hybrid_prefix = self._still(hybrid * prefix) + self._hybrid_members * self._x
        self.tokens = _integral(self._running, self._x)
        self._all_t = self._times(setting.hybrids + setting.standalones)
        self._alone_t = self._times(setting.standalones)
        self._late_t = self._alone_t * setting.stretch

    def placed(self, standalone: np.ndarray) -> None:  # type: ignore[type-arg]
        """Suppose that members are on standalone replicas where that is true, on hybrid ones otherwise."""
        self._hybrid = ~standalone
        self._hybrid_members = self._still(self._hybrid.astype(np.float64))
        self._hybrid_prefix = self._still(self._hybrid * self._prefix) + self._hybrid_members * self._x

    def tokens_after(self, seconds: float, *, lent: bool) -> float:
        """x after so many seconds from x = 0."""
        return float(np.interp(seconds, self._all_t if lent else self._alone_t, self._x))

    def needed(self, groups: np.ndarray, sampleable: int, mini_batches: int, x0: float) -> Floats:  # type: ignore[type-arg]
        """x at which each of the next mini-batches is complete, by scenario and mini-batch, with `groups` in flight."""
        completion = np.sort(self._later(groups, x0), axis=0)
        scenarios = self.completion.shape[1]
        needed = np.full((scenarios, mini_batches), x0)
        for index in range(mini_batches):
            missing = (index + 1) * self._setting.mini_batch - sampleable
            if missing > 0 and len(completion):
                needed[:, index] = completion[min(missing, len(completion)) - 1]
        return needed

    def _later(self, groups: np.ndarray, x0: float) -> Floats:  # type: ignore[type-arg]
        """Completions of groups that are known not to be complete at x0, by group and scenario.

        A scenario in which one would be is worth nothing any more: the others of that group stand in for it.
        """
        ranks, ordered = self._ranks[groups], self._ordered[groups]
        scenarios = ordered.shape[1]
        over = (ordered <= x0).sum(axis=1, keepdims=True)
        index = over + ranks * (scenarios - over) // scenarios
        later = np.take_along_axis(ordered, np.minimum(index, scenarios - 1), axis=1)
        return np.where(over < scenarios, later, x0 + _OVERDUE * (1 + ranks))

    # ----------------------------------------------------------------------------------------------- options

    def alone(self, needed: Floats, start_s: float, decode_s: float, x0: float = 0.0) -> Prospect:
        """Nothing is lent: the trainer can start at `start_s`, standalone replicas decode from `decode_s`."""
        before = np.interp(x0, self._x, self._alone_t)
        arrive = np.where(needed > x0, decode_s + np.interp(needed, self._x, self._alone_t) - before, 0.0)
        end = self._walk(arrive[None], np.array([start_s]))
        x_end = np.interp(np.maximum(end - decode_s, 0.0) + before, self._alone_t, self._x)
        return self._prospect(end, x_end, np.array([start_s]), needed.shape[1], np.zeros(1), x0)

    def lent(self, needed: Floats, serving_s: float, decode_s: float, x0: float, longest: float = inf) -> Prospect:
        """All replicas serve from `serving_s` and decode from `decode_s`, at x0; then the best moment to reclaim, at most
        `longest` seconds later."""
        setting = self._setting
        before = np.interp(x0, self._x, self._all_t)
        covered = decode_s + np.interp(needed.mean(axis=0)[-1], self._x, self._all_t) - before
        delta = _CANDIDATES * min(max(covered - serving_s, 1.0) * _BEYOND, longest)
        back = serving_s + delta
        x1 = np.interp(np.maximum(back - decode_s, 0.0) + before, self._all_t, self._x)
        prefix = np.interp(x1, self._x, self._hybrid_prefix)
        resume = back + prefix / (setting.prefill * setting.standalones)
        at_x1 = np.interp(x1, self._x, self._late_t)
        early = decode_s + np.interp(needed, self._x, self._all_t) - before
        late = np.interp(needed, self._x, self._late_t)
        arrive = np.where(
            needed[None] <= x1[:, None, None], early[None], (resume - at_x1)[:, None, None] + late[None]
        )
        arrive = np.where(needed[None] <= x0, 0.0, arrive)
        start = back + setting.reclaim_s
        end = self._walk(arrive, start)
        x_end = np.interp(np.maximum(end - resume[:, None], 0.0) + at_x1[:, None], self._late_t, self._x)
        return self._prospect(end, x_end, start, needed.shape[1], delta, x0)

    # ----------------------------------------------------------------------------------------------- details

    def _prospect(
        self, end: Floats, x_end: Floats, start: Floats, mini_batches: int, delta: Floats, x0: float
    ) -> Prospect:
        tokens = np.interp(x_end, self._x, self.tokens) - np.interp(x0, self._x, self.tokens)
        cost = (end - self._setting.token_value_s * tokens).mean(axis=1)
        best = int(np.argmin(cost))
        wait = float(end[best].mean() - start[best] - mini_batches * self._setting.mini_batch_s)
        return Prospect(float(cost[best]), wait, float(tokens[best].mean()), float(delta[best]))

    def _walk(self, arrive: Floats, start: Floats) -> Floats:
        """When the last mini-batch is trained, by candidate and scenario."""
        end = np.broadcast_to(start[:, None], arrive.shape[:2])
        for index in range(arrive.shape[2]):
            end = np.maximum(end, arrive[:, :, index]) + self._setting.mini_batch_s
        return end

    def _still(self, weight: Floats) -> Floats:
        """Expected sum of `weight` over the members that still run at every x."""
        scenarios = self._left.shape[1]
        sums = np.bincount(self._bins, np.repeat(weight, scenarios), minlength=_POINTS)
        return np.asarray((sums.sum() - np.cumsum(sums)) / scenarios)

    def _times(self, replicas: int) -> Floats:
        return _integral(self._setting.base + self._setting.slope * self._running / replicas, self._x)


def _integral(values: Floats, x: Floats) -> Floats:
    steps = (values[1:] + values[:-1]) / 2 * np.diff(x)
    return np.concatenate([[0.0], np.cumsum(steps)])
