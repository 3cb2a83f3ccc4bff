"""A workload from the events of a run of Turnout's own, which tell nearly all of it.

Invariant: nothing is searched for; every field is measured, or the base workload's and listed as assumed.

Formulas: lengths are split into levels of groups and members around them by an analysis of variance of the logarithms;
seconds per token and request against running requests are fitted by least squares, each window weighted by its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt
from statistics import fmean, pvariance

import numpy as np

from services.simulator.fitting.calibrate import Fit, FitError
from services.simulator.fitting.run_facts import RunFacts, Window
from services.simulator.fitting.spread import mean_before_cap
from services.simulator.workload import Batch, Costs, Engine, Lengths, Mode, Topology, Training, Workload

# With fewer groups a spread is not known, with fewer windows no curve.
_LEAST_GROUPS, _LEAST_WINDOWS = 16, 8
# Running requests have to differ so much, relative to their mean, before a slope is told from noise.
_LEAST_VARIETY = 0.15
# A window slower than the curve by this share saw more than decoding; looked at so many times, each by a better curve.
_STALLED, _ROUNDS = 0.08, 5


def fit_run(facts: RunFacts, base: Workload, name: str) -> Fit:
    """The workload of a run; `base` supplies what it cannot tell. Raises FitError."""
    if not facts.config:
        raise FitError("the events do not begin with the run's opening, so its configuration is not known")
    if len(facts.lengths) < _LEAST_GROUPS:
        raise FitError(f"{len(facts.lengths)} groups have finished; a fit needs at least {_LEAST_GROUPS}")
    if not facts.mini_batches:
        raise FitError("no mini-batch was trained on yet")
    assumed: list[str] = []
    config = facts.config
    batch = Batch(
        groups=config["train_batch_size"],
        group_size=max(len(lengths) for lengths in facts.lengths),
        mini_batch=config["mini_batch_size"],
        warmup_batches=config["num_warmup_batches"],
    )
    workload = base.model_copy(
        update={
            "name": name,
            "description": f"Fitted to {len(facts.steps)} steps of a run.",
            "steps": config["total_training_steps"],
            "topology": _topology(facts, base, assumed),
            "batch": batch,
            "lengths": _lengths(facts, base, assumed),
            "engine": _engine(facts, base, assumed),
            "costs": _costs(facts, base, assumed),
            "training": _training(facts, batch),
            "events": (),
            "reinstall_within_step": config["can_reinstall"],
        }
    )
    measured = {
        "steps": float(len(facts.steps)),
        "wait_seconds": fmean(wait for wait, _ in facts.steps) if facts.steps else 0.0,
        "step_seconds": fmean(whole for _, whole in facts.steps) if facts.steps else 0.0,
        "training_seconds": workload.training.step_s,
        "response_tokens": fmean(length for lengths in facts.lengths for length in lengths),
    }
    policy = config["policy"] if config["switch"]["enable_switch"] and config["hybrid_gpus"] else "off"
    return Fit(workload, policy, measured, tuple(assumed))


def _topology(facts: RunFacts, base: Workload, assumed: list[str]) -> Topology:
    hybrids, standalones = facts.hybrids, facts.standalones
    if not hybrids or not standalones:
        assumed.append("replicas of a pool that no reading showed")
    hybrids, standalones = hybrids or base.topology.hybrid_replicas, standalones or base.topology.standalone_replicas
    gpus = round(facts.config["standalone_gpus"] / standalones) or base.topology.gpus_per_replica
    return Topology(hybrid_replicas=hybrids, standalone_replicas=standalones, gpus_per_replica=gpus)


def _lengths(facts: RunFacts, base: Workload, assumed: list[str]) -> Lengths:
    longest = max(max(lengths) for lengths in facts.lengths)
    cap = facts.config["max_response_tokens"]
    if cap is None:
        cap = max(base.lengths.cap, longest)
        assumed.append(f"cap of the lengths ({cap} tokens)")
    logs = [[log(max(length, 1)) for length in lengths] for lengths in facts.lengths]
    within = fmean(pvariance(group) * len(group) / max(len(group) - 1, 1) for group in logs)
    size = fmean(len(group) for group in logs)
    between = max(pvariance([fmean(group) for group in logs]) - within / size, 0.0)
    mean = fmean(length for lengths in facts.lengths for length in lengths)
    log_std = min(max(sqrt(between + within), 1e-3), 3.0)
    before = mean_before_cap(mean, log_std, cap) if mean < cap else float(cap)
    share = between / (between + within) if between + within > 0 else 0.0
    return Lengths(modes=(Mode(mean=before, log_std=log_std, between=share),), cap=cap)


def _engine(facts: RunFacts, base: Workload, assumed: list[str]) -> Engine:
    prefill = base.engine.prefill_tokens_per_s
    if facts.prefill_s > 0 and facts.prefilled > 0:
        prefill = facts.prefilled / facts.prefill_s
    else:
        assumed.append(f"prefill speed ({prefill:g} tokens/s)")
    if len(facts.windows) < _LEAST_WINDOWS:
        assumed.append("decode curve (the engines were read too seldom)")
        return base.engine.model_copy(update={"prefill_tokens_per_s": prefill})
    curve = _curve(facts.windows)
    if curve is None:
        # One point of the curve: the base's shape through it.
        running = fmean(window.running for window in facts.windows)
        ratio = _mean_token_s(facts.windows) / (base.engine.base_s + base.engine.per_request_s * running)
        curve = base.engine.base_s * ratio, base.engine.per_request_s * ratio
        assumed.append("how decoding slows down with more requests (their number hardly changed)")
    return Engine(base_s=curve[0], per_request_s=curve[1], prefill_tokens_per_s=prefill)


def _curve(windows: Sequence[Window]) -> tuple[float, float] | None:
    running = np.array([window.running for window in windows])
    token_s = np.array([window.token_s for window in windows])
    weight = np.sqrt([window.tokens for window in windows])
    if running.std() < _LEAST_VARIETY * running.mean():
        return None
    # Stalls, as for a prefill that its counter shows later, make windows slower and never faster.
    for _ in range(_ROUNDS):
        slope, base = np.polyfit(running, token_s, 1, w=weight)
        kept = token_s <= (1 + _STALLED) * (base + slope * running)
        if kept.all() or kept.sum() < _LEAST_WINDOWS:
            break
        running, token_s, weight = running[kept], token_s[kept], weight[kept]
    return (float(base), float(slope)) if base > 0 and slope >= 0 else None


def _mean_token_s(windows: Sequence[Window]) -> float:
    tokens = sum(window.tokens for window in windows)
    return sum(window.token_s * window.tokens for window in windows) / tokens


def _costs(facts: RunFacts, base: Workload, assumed: list[str]) -> Costs:
    found: dict[str, float] = {}
    for name, seen, what in (
        ("lend_s", facts.lends, "cost of a lend"),
        ("reclaim_s", facts.reclaims, "cost of a reclaim"),
        ("sync_s", facts.syncs, "time of a weight update"),
    ):
        found[name] = fmean(seen) if seen else getattr(base.costs, name)
        if not seen:
            assumed.append(f"{what} ({found[name]:g} s)")
    return Costs(**found)


def _training(facts: RunFacts, batch: Batch) -> Training:
    mean = fmean(facts.mini_batches)
    log_std = min(sqrt(log(1 + pvariance(facts.mini_batches) / mean**2)), 3.0) if mean > 0 else 0.0
    return Training(step_s=max(mean, 1e-6) * (batch.groups // batch.mini_batch), log_std=log_std)
