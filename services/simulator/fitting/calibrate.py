"""Puts what a log tells into a workload, and finds the engine speed with which the workload waits as the run did.

A log has no decode curve. What it has is the time that the trainer waited, and that depends on the speed alone once
lengths, training and costs are known: one factor on both terms of the base workload's curve is searched for, simulating
the policy that the run had.

Invariants: topology and batch are the base workload's, and refused if the log contradicts them; a fit whose waits the
search could not reach says so in `assumed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, pstdev

from services.simulator.fitting.spread import log_std_of, mean_before_cap
from services.simulator.fitting.verl_log import RunLog, Step
from services.simulator.simulate import simulate
from services.simulator.workload import Costs, Engine, Lengths, Training, Workload

# Seeds whose mean is compared with the log; their noise is about a third of the log's own.
_SEEDS = (101, 102, 103)
_STEPS = 60
# Beyond a factor of 8 either way the base workload is another engine.
_WIDEST = log(8.0)
_ROUNDS = 9
SEARCH_STEPS = _ROUNDS * len(_SEEDS) * _STEPS
"""Steps that one search simulates."""
# A trainer that waits for less than this share of its training says nothing of the engines' speed.
_NO_WAIT = 0.01


class FitError(ValueError):
    """Log and workload contradict each other; the message names both values."""


@dataclass(frozen=True, slots=True)
class Fit:
    """workload: the fitted one. policy: what the run did, `off` or `verl`. measured: what was fitted to, by name.
    assumed: what the log does not tell, in words."""

    workload: Workload
    policy: str
    measured: dict[str, float]
    assumed: tuple[str, ...]


def fit(log_: RunLog, base: Workload, name: str, progress: Callable[[int], None] | None = None) -> Fit:
    """`base` with everything that the log tells. `progress` is told the simulated steps. Raises FitError."""
    _check(log_.steps, base)
    steps, assumed = log_.settled, list[str]()
    wait_s = fmean(step.wait_s for step in steps)
    train_s = fmean(step.train_s for step in steps)
    length = fmean(step.length_mean for step in steps)
    clip = fmean(step.clip_ratio for step in steps)
    fitted = base.model_copy(
        update={
            "name": name,
            "description": f"Fitted to {len(steps)} logged steps; topology and batch of {base.name}.",
            "lengths": _lengths(base, length, clip, assumed),
            "training": Training(step_s=train_s, log_std=_training_noise(steps, base)),
            "costs": _costs(steps, base.costs, assumed),
        }
    )
    policy = "verl" if log_.switching else "off"
    fitted = match_wait(fitted, policy, wait_s, log_.skipped, assumed, progress)
    assumed.append(f"prefill speed ({base.engine.prefill_tokens_per_s:g} tokens/s)")
    measured = {
        "steps": float(len(steps)),
        "wait_seconds": wait_s,
        "wait_seconds_error": standard_error([step.wait_s for step in steps]),
        "training_seconds": train_s,
        "response_tokens": length,
        "clip_ratio": clip,
    }
    return Fit(fitted, policy, measured, tuple(assumed))


def match_wait(
    workload: Workload,
    policy: str,
    wait_s: float,
    skip: int,
    assumed: list[str],
    progress: Callable[[int], None] | None = None,
) -> Workload:
    """`workload` with its decode curve scaled so that a step waits `wait_s` on average, `skip` first ones left out."""
    if wait_s < _NO_WAIT * workload.training.step_s:
        assumed.append("engine speed (the trainer never waited: the engines may be any faster)")
    low, high = -_WIDEST, _WIDEST
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if _simulated_wait(_scaled(workload, exp(middle)), policy, skip, progress) < wait_s:
            low = middle
        else:
            high = middle
    found = (low + high) / 2
    if abs(found) > 0.95 * _WIDEST:
        assumed.append("engine speed (no speed within a factor of 8 of the workload's waits as the run did)")
    return _scaled(workload, exp(found))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; neighbouring steps share rollouts, so pairs of them count as one value."""
    pairs = [fmean(values[at : at + 2]) for at in range(0, len(values) - 1, 2)]
    return pstdev(pairs) / sqrt(max(len(pairs) - 1, 1)) if len(pairs) > 1 else 0.0


def _check(steps: Sequence[Step], base: Workload) -> None:
    batch, topology = base.batch, base.topology
    per_step = batch.groups * batch.group_size
    seen = {step.trajectories for step in steps if step.trajectories is not None}
    # Padding and filters leave a few out or add a few.
    if seen and not any(abs(count - per_step) <= 0.05 * per_step for count in seen):
        raise FitError(
            f"the log has about {sorted(seen)[len(seen) // 2]} trajectories a step, the workload {base.name!r} has "
            f"{batch.groups} groups of {batch.group_size} = {per_step}: name one with the run's batch"
        )
    gpus = (topology.hybrid_replicas + topology.standalone_replicas) * topology.gpus_per_replica
    logged = {step.gpus for step in steps if step.gpus is not None}
    if logged and gpus not in logged:
        raise FitError(
            f"the log has {sorted(logged)[0]} GPUs (perf/throughput), the workload {base.name!r} has {gpus}: name one "
            "with the run's topology"
        )
    longest = max(step.length_mean for step in steps)
    if longest >= base.lengths.cap:
        raise FitError(f"the log has a mean length of {longest:g} tokens, the workload's cap is {base.lengths.cap}")


def _lengths(base: Workload, mean: float, clip: float, assumed: list[str]) -> Lengths:
    lengths = base.lengths
    if len(lengths.modes) > 1:
        shift = mean / _weighted_mean(lengths)
        assumed.append("shape of the lengths (the workload has several modes; their means were scaled)")
        modes = tuple(mode.model_copy(update={"mean": mode.mean * shift}) for mode in lengths.modes)
        return lengths.model_copy(update={"modes": modes})
    mode = lengths.modes[0]
    log_std = mode.log_std
    if clip > 0:
        log_std = log_std_of(mean, clip, lengths.cap)
    else:
        assumed.append(f"spread of lengths ({log_std:g}, as no response reached the cap)")
    assumed.append(f"share of the spread that lies between prompts ({mode.between:g})")
    before = mean_before_cap(mean, max(log_std, 1e-3), lengths.cap)
    return lengths.model_copy(update={"modes": (mode.model_copy(update={"mean": before, "log_std": log_std}),)})


def _weighted_mean(lengths: Lengths) -> float:
    weight = sum(mode.weight for mode in lengths.modes)
    return sum(mode.weight * mode.mean for mode in lengths.modes) / weight


def _training_noise(steps: Sequence[Step], base: Workload) -> float:
    """Log-deviation of a mini-batch, from that of a step: mini-batches of a step vary independently."""
    times = [step.train_s for step in steps]
    mini_batches = base.batch.groups // base.batch.mini_batch
    return min(sqrt(log(1 + mini_batches * (pstdev(times) / fmean(times)) ** 2)), 3.0)


def _costs(steps: Sequence[Step], base: Costs, assumed: list[str]) -> Costs:
    lends = [step.lend_s for step in steps if step.lend_s is not None]
    reclaims = [step.reclaim_s for step in steps if step.reclaim_s is not None]
    for what, seen, seconds in (("lend", lends, base.lend_s), ("reclaim", reclaims, base.reclaim_s)):
        if not seen:
            assumed.append(f"cost of a {what} ({seconds:g} s)")
    return base.model_copy(
        update={
            "lend_s": fmean(lends) if lends else base.lend_s,
            "reclaim_s": fmean(reclaims) if reclaims else base.reclaim_s,
            "sync_s": fmean(step.sync_s for step in steps),
        }
    )


def _scaled(workload: Workload, factor: float) -> Workload:
    engine = workload.engine
    curve: Engine = engine.model_copy(
        update={"base_s": engine.base_s * factor, "per_request_s": engine.per_request_s * factor}
    )
    return workload.model_copy(update={"engine": curve})


def _simulated_wait(workload: Workload, policy: str, skip: int, progress: Callable[[int], None] | None) -> float:
    short = workload.model_copy(update={"steps": _STEPS, "events": ()})
    waits: list[float] = []
    for seed in _SEEDS:
        steps = simulate(short, policy, seed).steps[skip:]
        waits += [step.wait_s + step.lent_wait_s for step in steps]
        if progress is not None:
            progress(_STEPS)
    return fmean(waits)
