"""What the rest of a step costs, by when the GPUs come back.

All requests in flight decode at one common speed, so "x more tokens each" is the axis on which groups complete; a flow
maps it to time, once for all replicas and once for the standalone ones. Completions are drawn as scenarios, and the
waits of the remaining mini-batches are walked in each.

Invariants: times are seconds from now; the curves rise; nothing here is remembered between two outlooks.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from services.scheduler.policies.jit.lengths import Floats

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

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
    replica. lend_s, reclaim_s: costs. mini_batch_s: training of one. stretch: how much longer than modelled
    arrivals take after a reclaim."""

    hybrids: int
    standalones: int
    base: float
    slope: float
    prefill: float
    lend_s: float
    reclaim_s: float
    mini_batch: int
    mini_batch_s: float
    stretch: float


@dataclass(frozen=True, slots=True)
class Prospect:
    """An option in seconds: the time until the step ends, the wait within the step, for a lend when to take the GPUs
    back, and the time until the step ends if the best moment were known in advance."""

    end_s: float
    wait_s: float
    reclaim_in_s: float = 0.0
    foreseen_s: float = 0.0


class Flow:
    """Requests decoding from x = 0 on. running: how many still run at every x; moved: tokens that a reclaim there has
    to prefill again."""

    def __init__(self, x: Floats, running: Floats, moved: Floats, setting: Setting) -> None:
        self.x = x
        self.moved = moved
        self.setting = setting
        self.all_t = _times(x, running, setting.hybrids + setting.standalones, setting)
        self.alone_t = _times(x, running, setting.standalones, setting)

    def alone(self, needed: Floats, start_s: float, decode_s: float, x0: float = 0.0) -> Prospect:
        """Nothing is lent: the trainer can start at `start_s`, standalone replicas decode from `decode_s`, at x0."""
        before = np.interp(x0, self.x, self.alone_t)
        arrive = np.where(needed > x0, decode_s + np.interp(needed, self.x, self.alone_t) - before, 0.0)
        start = np.array([start_s])
        end = self._walk(arrive[None], start)
        return self._best(end, start, needed.shape[1], np.zeros(1))

    def lent(self, needed: Floats, serving_s: float, decode_s: float, x0: float, longest: float = inf) -> Prospect:
        """All replicas serve from `serving_s` and decode from `decode_s`, at x0; then the best moment to reclaim, at
        most `longest` seconds later."""
        setting = self.setting
        before = np.interp(x0, self.x, self.all_t)
        covered = decode_s + np.interp(needed.mean(axis=0)[-1], self.x, self.all_t) - before
        delta = _CANDIDATES * min(max(covered - serving_s, 1.0) * _BEYOND, longest)
        back = serving_s + delta
        x1 = np.interp(np.maximum(back - decode_s, 0.0) + before, self.all_t, self.x)
        resume = back + np.interp(x1, self.x, self.moved) / (setting.prefill * setting.standalones)
        late_t = self.alone_t * setting.stretch
        at_x1 = np.interp(x1, self.x, late_t)
        early = decode_s + np.interp(needed, self.x, self.all_t) - before
        late = np.interp(needed, self.x, late_t)
        arrive = np.where(needed[None] <= x1[:, None, None], early[None], (resume - at_x1)[:, None, None] + late[None])
        arrive = np.where(needed[None] <= x0, 0.0, arrive)
        start = back + setting.reclaim_s
        end = self._walk(arrive, start)
        return self._best(end, start, needed.shape[1], delta)

    def _best(self, end: Floats, start: Floats, mini_batches: int, delta: Floats) -> Prospect:
        mean = end.mean(axis=1)
        best = int(np.argmin(mean))
        wait = float(end[best].mean() - start[best] - mini_batches * self.setting.mini_batch_s)
        return Prospect(float(mean[best]), wait, float(delta[best]), float(end.min(axis=0).mean()))

    def _walk(self, arrive: Floats, start: Floats) -> Floats:
        """When the last mini-batch is trained, by candidate and scenario."""
        end = np.broadcast_to(start[:, None], arrive.shape[:2])
        for index in range(arrive.shape[2]):
            end = np.maximum(end, arrive[:, :, index]) + self.setting.mini_batch_s
        return end


class Outlook:
    """Scenarios of one moment.

    left: tokens still to come, by unsettled member and scenario, in the order of groups; first: the first member of
    every group; prefix: tokens a member has; hybrid: whether it runs on a hybrid replica.
    """

    def __init__(self, left: Floats, first: Indices, prefix: Floats, hybrid: Flags, setting: Setting) -> None:
        self.setting = setting
        self.members = len(left)
        self._scenarios = left.shape[1]
        self._prefix = prefix
        self.completion = np.maximum.reduceat(left, first, axis=0)
        """Tokens until a group is complete, by group and scenario."""
        order = np.argsort(self.completion, axis=1)
        self._ranks = np.argsort(order, axis=1)
        self._ordered = np.take_along_axis(self.completion, order, axis=1)
        self._longest = max(float(left.max()), 1.0)
        self.x = np.linspace(0.0, 1.0, _POINTS) ** 2 * self._longest
        self._bins = self._binned(left)
        self._running = self._still(np.ones(len(left)), self._bins)
        self.flow = self.placed(hybrid)

    def placed(self, hybrid: Flags) -> Flow:
        """The flow if members are on hybrid replicas where that is true."""
        moved = (
            self._still(hybrid * self._prefix, self._bins) + self._still(hybrid.astype(np.float64), self._bins) * self.x
        )
        return Flow(self.x, self._running, moved, self.setting)

    def tokens_after(self, seconds: float, *, lent: bool) -> float:
        """x after so many seconds from x = 0."""
        return float(np.interp(seconds, self.flow.all_t if lent else self.flow.alone_t, self.x))

    def needed(self, groups: Indices, sampleable: int, mini_batches: int, x0: float) -> Floats:
        """x at which each of the next mini-batches is complete, by scenario and mini-batch, with `groups` in flight."""
        later = np.sort(self._later(groups, x0), axis=0)
        return reached(later, sampleable, self.setting.mini_batch, mini_batches, x0)

    def _later(self, groups: Indices, x0: float) -> Floats:
        """Completions of groups that are known not to be complete at x0, by group and scenario.

        A scenario in which one would be is worth nothing any more: the others of that group stand in for it.
        """
        ranks, ordered = self._ranks[groups], self._ordered[groups]
        scenarios = self._scenarios
        over = (ordered <= x0).sum(axis=1, keepdims=True)
        index = over + ranks * (scenarios - over) // scenarios
        later = np.take_along_axis(ordered, np.minimum(index, scenarios - 1), axis=1)
        return np.where(over < scenarios, later, x0 + _OVERDUE * (1 + ranks))

    # ----------------------------------------------------------------------------------------------- details

    def _binned(self, left: Floats) -> Indices:
        """The first point of the axis that is not below, which the square root finds without a search."""
        scaled = np.sqrt(left * ((_POINTS - 1) ** 2 / self._longest))
        return np.ceil(scaled - 1e-9).astype(np.int64).ravel()

    def _still(self, weight: Floats, bins: Indices) -> Floats:
        """Expected sum of `weight` over the members that still run at every x."""
        sums = np.bincount(bins, np.repeat(weight, self._scenarios), minlength=_POINTS)
        return np.asarray((sums.sum() - np.cumsum(sums)) / self._scenarios)


def reached(completion: Floats, sampleable: int, mini_batch: int, mini_batches: int, x0: float) -> Floats:
    """x at which each of the next mini-batches is complete, by scenario and mini-batch.

    completion: by group and scenario, rising with the group.
    """
    needed = np.full((completion.shape[1], mini_batches), x0)
    for index in range(mini_batches):
        missing = (index + 1) * mini_batch - sampleable
        if missing > 0 and len(completion):
            needed[:, index] = np.maximum(completion[min(missing, len(completion)) - 1], x0)
    return needed


def _times(x: Floats, running: Floats, replicas: int, setting: Setting) -> Floats:
    speed = setting.base + setting.slope * running / replicas
    steps = (speed[1:] + speed[:-1]) / 2 * np.diff(x)
    return np.concatenate([[0.0], np.cumsum(steps)])
