"""Scenarios of everything in flight, and the two options at a lend.

Invariants: groups that are not running yet come last; a placement keeps the longest prefixes on standalone replicas, as
many as make all replicas equally full, so that a reclaim moves few tokens.
"""

from dataclasses import dataclass

import numpy as np

from services.scheduler.policies.jit.inflight import Groups, InFlight
from services.scheduler.policies.jit.lengths import Floats, LengthModel
from services.scheduler.policies.jit.outlook import Indices, Outlook, Prospect, Setting
from services.scheduler.policies.types import Placement

# Twice as many changed no decision that mattered; half as many made the moment of a reclaim noisy.
SCENARIOS = 24


@dataclass(frozen=True, slots=True)
class Forecast:
    """`flight` and what may become of it."""

    flight: InFlight
    outlook: Outlook

    def alive(self, groups: Groups) -> Indices:
        """Which of its groups have not finished since."""
        names = self.flight.names
        known = [index for index, name in enumerate(names) if groups.has(name)]
        return np.array([*known, *range(len(names), self.outlook.completion.shape[0])], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Options:
    """Not lending, and lending with a placement."""

    alone: Prospect
    lent: Prospect
    placement: Placement

    @property
    def gain_s(self) -> float:
        """Seconds by which the step ends sooner with a lend whose end is decided when it comes."""
        return self.alone.end_s - self.lent.foreseen_s


def forecast(flight: InFlight, fresh: int, size: int, lengths: LengthModel, setting: Setting) -> Forecast:
    """`fresh` groups of `size` run nowhere yet."""
    old, new = lengths.draw(flight.snapshot, fresh, size, SCENARIOS)
    first = np.concatenate([flight.snapshot.first, len(old) + size * np.arange(fresh)])
    prefix = np.concatenate([flight.snapshot.tokens, np.zeros(len(new))])
    # New groups go where the fewest requests are, that is evenly.
    share = setting.hybrids / (setting.hybrids + setting.standalones)
    hybrid = np.concatenate([flight.hybrid, np.arange(len(new)) < share * len(new)])
    return Forecast(flight, Outlook(np.concatenate([old, new]), first, prefix, hybrid, setting))


def options(known: Forecast, needed: Floats, setting: Setting, sync_s: float, x0: float) -> Options:
    """Both options now; `sync_s` passes first, in which nothing decodes and after which everything is prefilled again.

    needed: of the outlook. With `sync_s` 0, within a step, standalone replicas go on undisturbed unless GPUs are lent.
    """
    outlook, tokens = known.outlook, known.flight.snapshot.tokens
    replicas = setting.hybrids + setting.standalones
    order = np.argsort(-tokens, kind="stable")
    share = min(outlook.members * setting.standalones // replicas, len(tokens))
    stay = np.zeros(outlook.members, dtype=np.bool_)
    stay[order[:share]] = True
    staying, leaving = float(tokens[order[:share]].sum()), float(tokens[order[share:]].sum())
    rate = setting.prefill * setting.standalones

    again = sync_s + (staying + leaving) / rate if sync_s > 0 else 0.0
    alone = outlook.flow.alone(needed, sync_s, again, x0)
    serving = sync_s + setting.lend_s
    # While the hybrids load weights, the standalone share decodes on.
    ahead = max(setting.lend_s - staying / rate, 0.0) * setting.standalones / replicas
    start = outlook.tokens_after(ahead, lent=True)
    loaded = serving + leaving / (setting.prefill * max(setting.hybrids, 1))
    lent = outlook.placed(~stay).lent(needed, serving, loaded, x0 + start)
    keys, runs = known.flight.keys, known.flight.running
    return Options(
        alone,
        lent,
        Placement(
            hybrid=tuple(keys[index] for index in order[share:] if runs[index]),
            standalone=tuple(keys[index] for index in order[:share] if runs[index]),
        ),
    )
