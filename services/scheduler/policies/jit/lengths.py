"""How long responses are, learned from groups that finished; what the running ones may still become.

A group has a level u (mean log-length) and its members scatter around it: log-length = u + sigma x residual. The
density of levels is estimated from finished groups, residuals are the pooled ones of their members, so no shape is
assumed. While a run is young, groups that still run take part in the density with what they may become.

Invariants: a survival is positive up to the cap, so no running request is impossible; drawing uses fixed uniform
numbers, so the same knowledge always gives the same draws.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Three batches of the published setting: enough for 30 levels, few enough to follow a run that changes.
WINDOW = 192
LEVELS = 30
# Fewer finished groups say more about which prompts are short than about how long responses are; a whole batch of a
# small run is as good.
_ENOUGH = 48
# Bandwidth of the levels' density as a share of Silverman's rule, which is for one normal: half keeps two kinds of
# prompts apart and still reaches a little beyond the longest group seen.
_BANDWIDTH_SHARE = 0.5
_BANDWIDTH_FLOOR = 0.02
# Levels reach this far above everything seen, in log-length, with this share of the weight: a run whose responses
# become longer is noticed before it finishes any.
_ABOVE = 1.2
_ABOVE_SHARE = 0.01
# Rounds in which the levels of running groups and the density of all levels are made to agree.
_ROUNDS = 4
# Weight, in members, of the wide normal that keeps the survival of the residuals positive in the tails.
_TAIL_MEMBERS = 8.0
_TAIL_STD = 1.6
# A group of one has no scatter within; a narrow one keeps the arithmetic finite.
_SIGMA_FLOOR = 0.05
_Z = np.arange(-8.0, 8.0001, 0.04)
# Where the inverse of the survival is tabulated: by its square root, so that the long tail is resolved as well.
_INVERSE_POINTS = 2048
_INVERSE = ((np.arange(_INVERSE_POINTS + 1) + 0.5) / _INVERSE_POINTS) ** 2
# A prime, far above the members in flight, so that few share a row and none does so for long.
_ROWS = 8191


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Groups in flight. Arrays over groups: settled members, their mean log-length (0 if none), first member in
    `tokens`, serial number. Arrays over unsettled members, in the order of groups: tokens so far, group, serial number.

    Serial numbers stay with a group and a member, and choose their uniform numbers: two predictions shortly after
    each other differ by what was learned in between, not by luck.
    """

    settled: Floats
    settled_level: Floats
    first: npt.NDArray[np.int64]
    tokens: Floats
    group: npt.NDArray[np.int64]
    group_serial: npt.NDArray[np.int64]
    serial: npt.NDArray[np.int64]


class LengthModel:
    """Learns from `finished`, then draws what is left of a snapshot."""

    def __init__(self, cap: int | None, batch: int) -> None:
        self._cap = float(cap) if cap is not None else np.inf
        self._enough = min(_ENOUGH, batch)
        self._levels_seen: deque[float] = deque(maxlen=WINDOW)
        self._own: deque[Floats] = deque(maxlen=WINDOW)
        self._stale = True
        self._finished = 0
        self._levels: Floats = np.zeros(0)
        self._prior: Floats = np.zeros(0)
        self._sigma = 1.0
        self._survival: Floats = np.ones_like(_Z)
        self._residual: Floats = np.zeros(0)

    @property
    def finished_groups(self) -> int:
        """Groups learned from, at most the window."""
        return len(self._own)

    @property
    def ready(self) -> bool:
        """Whether there is enough to predict with."""
        return len(self._own) >= self._enough

    def finished(self, lengths: tuple[int, ...]) -> None:
        """A group settled with these lengths."""
        if lengths:
            logs = np.log(np.maximum(np.array(lengths, dtype=np.float64), 1.0))
            level = float(logs.sum()) / len(logs)
            # Members lie closer to their own mean than to the level it estimates, by (k - 1) / k of the variance.
            self._levels_seen.append(level)
            self._own.append((logs - level) * np.sqrt(len(logs) / max(len(logs) - 1, 1)))
            self._stale = True
            self._finished += 1

    def draw(self, snapshot: Snapshot, fresh: int, size: int, scenarios: int) -> tuple[Floats, Floats]:
        """Tokens still to come, by unsettled member and scenario: of the snapshot, and of `fresh` groups of `size`."""
        self._fit()
        log_tokens = np.log(np.maximum(snapshot.tokens, 1.0))
        likely = self._likely(snapshot, log_tokens)
        prior = self._with_running(likely)
        weights = likely * prior
        weights /= weights.sum(axis=1, keepdims=True)
        by_group, by_member = _uniforms(snapshot.group_serial, scenarios), _uniforms(snapshot.serial, scenarios)
        chosen = (np.cumsum(weights, axis=1)[:, None, :-1] < by_group[:, :, None]).sum(axis=2)
        level = self._levels[chosen][snapshot.group]
        known = self._survive((log_tokens[:, None] - level) / self._sigma)
        left = self._length(level, known * by_member) - snapshot.tokens[:, None]
        new_group = _uniforms(np.arange(fresh), scenarios)
        new_level = self._levels[np.searchsorted(np.cumsum(prior)[:-1], new_group)]
        new = self._length(
            np.repeat(new_level, size, axis=0), _uniforms(np.arange(fresh, fresh * (size + 1)), scenarios)
        )
        return np.maximum(left, 1.0), new

    # ------------------------------------------------------------------------------------------------ details

    def _fit(self) -> None:
        if not self._stale:
            return
        self._stale = False
        own = np.concatenate(self._own)
        self._sigma = max(float(np.sqrt((own**2).mean())), _SIGMA_FLOOR)
        self._levels, self._prior = _density(np.array(self._levels_seen))
        residuals = np.sort(own / self._sigma)
        counted = len(residuals) - np.searchsorted(residuals, _Z)
        tail = _TAIL_MEMBERS * _normal_survival(_Z / _TAIL_STD)
        self._survival = (counted + tail) / (len(residuals) + _TAIL_MEMBERS)
        self._residual = np.interp(_INVERSE, self._survival[::-1], _Z[::-1])

    def _with_running(self, likely: Floats) -> Floats:
        """The density of levels. While a run is young, those that finished are the short ones of all that began, and
        what still runs counts as much; later those that finish are a fair sample."""
        count = len(self._levels_seen)
        young = min(max(2.0 - self._finished / WINDOW, 0.0), 1.0)
        prior = self._prior
        if young == 0.0:
            return prior
        for _ in range(_ROUNDS):
            each = likely * prior
            each /= each.sum(axis=1, keepdims=True)
            prior = (count * self._prior + young * each.sum(axis=0)) / (count + young * len(likely))
        return prior

    def _likely(self, snapshot: Snapshot, log_tokens: Floats) -> Floats:
        """How likely every level makes a group, given what its members have and how long those that settled were."""
        if not len(snapshot.first):
            return np.zeros((0, len(self._levels)))
        running = np.log(self._survive((log_tokens[:, None] - self._levels) / self._sigma))
        likely = np.add.reduceat(running, snapshot.first, axis=0)
        off = (snapshot.settled_level[:, None] - self._levels) / self._sigma
        likely -= 0.5 * snapshot.settled[:, None] * off**2
        return np.asarray(np.exp(likely - likely.max(axis=1, keepdims=True)))

    def _survive(self, z: Floats) -> Floats:
        index = ((z - _Z[0]) * (1 / (_Z[1] - _Z[0]))).astype(np.int64)
        return np.asarray(self._survival[np.clip(index, 0, len(_Z) - 1)])

    def _length(self, level: Floats, survival: Floats) -> Floats:
        z = self._residual[(np.sqrt(survival) * _INVERSE_POINTS).astype(np.int64)]
        return np.asarray(np.minimum(np.exp(level + self._sigma * z), self._cap))


def _density(levels: Floats) -> tuple[Floats, Floats]:
    """An even grid of levels, and the weight of each: a kernel estimate, and a little for what was never seen."""
    width = max(_BANDWIDTH_SHARE * 1.06 * float(levels.std()) * len(levels) ** -0.2, _BANDWIDTH_FLOOR)
    grid = np.linspace(levels.min() - 2 * width, levels.max() + _ABOVE, LEVELS)
    width = max(width, grid[1] - grid[0])
    seen = np.exp(-0.5 * ((grid[:, None] - levels) / width) ** 2).sum(axis=1)
    above = (grid > levels.max()).astype(np.float64)
    return grid, (1 - _ABOVE_SHARE) * seen / seen.sum() + _ABOVE_SHARE * above / above.sum()


def _normal_survival(z: Floats) -> Floats:
    """1 - Phi(z), to 1e-5. Source: Abramowitz and Stegun 26.2.17."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * poly
    return np.asarray(np.where(z >= 0, upper, 1 - upper))


@lru_cache(maxsize=4)
def _table(scenarios: int) -> Floats:
    """Uniform numbers, each row a shuffled stratified sample, so that few scenarios cover the whole range."""
    generator = np.random.default_rng(scenarios)
    strata = generator.permuted(np.tile(np.arange(scenarios), (_ROWS, 1)), axis=1)
    return np.asarray((strata + generator.random((_ROWS, scenarios))) / scenarios)


def _uniforms(serials: npt.NDArray[np.int64], scenarios: int) -> Floats:
    """The rows of those serial numbers."""
    return _table(scenarios)[serials % _ROWS]
