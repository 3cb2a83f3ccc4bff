"""The chances of one simulated run, drawn before it begins.

Invariants: the same workload and seed give the same draws whatever a policy decides, so that runs of two policies with
one seed are paired; a group's lengths depend on its place in the run alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.simulator.profile import factor
from services.simulator.workload import Workload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draws:
    """lengths: tokens by group and trajectory, groups in the order of their addition. train_s: seconds by step (from 0)
    and mini-batch. lend_s, reclaim_s, sync_s: seconds by step (from 0)."""

    lengths: npt.NDArray[np.int64]
    train_s: Floats
    lend_s: Floats
    reclaim_s: Floats
    sync_s: Floats


def warmup_groups(workload: Workload) -> int:
    """Groups added before the first step."""
    return round(workload.batch.warmup_batches * workload.batch.groups)


def draw(workload: Workload, seed: int) -> Draws:
    """All chances of a run of `workload` with `seed`."""
    # Independent streams: a workload with other costs keeps the lengths of the same seed.
    for_lengths, for_training, for_costs = np.random.default_rng(seed).spawn(3)
    costs, steps = workload.costs, workload.steps
    noise = _noise(for_costs, costs.log_std, (3, steps))
    return Draws(
        lengths=_lengths(workload, for_lengths),
        train_s=_train_s(workload, for_training),
        lend_s=costs.lend_s * noise[0],
        reclaim_s=costs.reclaim_s * noise[1],
        sync_s=costs.sync_s * noise[2],
    )


def _noise(generator: np.random.Generator, log_std: float, shape: tuple[int, ...]) -> Floats:
    """Lognormal factors of mean 1."""
    return np.exp(generator.normal(-(log_std**2) / 2, log_std, shape))


def _train_s(workload: Workload, generator: np.random.Generator) -> Floats:
    batch, training, steps = workload.batch, workload.training, workload.steps
    mini_batches = batch.groups // batch.mini_batch
    trend = np.array([factor(training.trend, step, steps) for step in range(1, steps + 1)])
    noise = _noise(generator, training.log_std, (steps, mini_batches))
    return training.step_s / mini_batches * trend[:, None] * noise


def _lengths(workload: Workload, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    batch, lengths, steps = workload.batch, workload.lengths, workload.steps
    warmup = warmup_groups(workload)
    groups = warmup + steps * batch.groups
    weights = np.array([mode.weight for mode in lengths.modes])
    chosen = generator.choice(len(weights), size=groups, p=weights / weights.sum())
    mean = np.array([mode.mean for mode in lengths.modes])[chosen]
    log_std = np.array([mode.log_std for mode in lengths.modes])[chosen]
    between = np.array([mode.between for mode in lengths.modes])[chosen]
    trend = np.array([factor(lengths.trend, step, steps) for step in range(1, steps + 1)])
    born = np.concatenate([np.zeros(warmup, dtype=int), np.repeat(np.arange(steps), batch.groups)])
    middle = np.log(mean * trend[born]) - log_std**2 / 2 + generator.normal(size=groups) * log_std * np.sqrt(between)
    own = generator.normal(size=(groups, batch.group_size)) * (log_std * np.sqrt(1 - between))[:, None]
    drawn: npt.NDArray[np.int64] = np.clip(np.exp(middle[:, None] + own), 1, lengths.cap).astype(np.int64)
    return drawn
