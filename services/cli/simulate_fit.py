"""`turnout simulate --from-verl-metrics` and `--from-run`: a run's own workload, and its variants under other
assumptions.

Invariant: what was measured and what is assumed is said on stderr, so that nobody takes an assumption for a finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from services.cli.progress import progress_bar
from services.simulator import Workload
from services.simulator.fitting import (
    NAMES,
    SEARCH_STEPS,
    Fit,
    FitError,
    LogError,
    facts_of,
    fit,
    fit_run,
    read,
    variants,
)
from turnout.scheduler.v1 import events_pb2

_NAME = "verl-run"


def fitted(path: Path, base: list[Workload], *, quiet: bool) -> list[Workload]:
    """The fitted workload first, then its variants. `quiet` leaves out what was found."""
    if len(base) != 1:
        raise click.UsageError("--from-verl-metrics fits one workload: name the one with the run's topology and batch")
    try:
        log = read(path)
        with progress_bar("fitting", SEARCH_STEPS * (1 + len(NAMES))) as advance:
            found = fit(log, base[0], _NAME, advance)
            others = variants(found, log.skipped, advance)
    except (LogError, FitError) as error:
        raise click.UsageError(f"--from-verl-metrics: {error}") from error
    if not quiet:
        click.echo(_summary(found, path.name), err=True)
    return [found.workload, *others]


def fitted_to_run(events: Iterable[events_pb2.RunEvent], name: str, base: list[Workload], *, quiet: bool) -> Workload:
    """The workload of a run of Turnout's own; `base` supplies what its events do not tell."""
    if len(base) != 1:
        raise click.UsageError("--from-run fits one workload; --workload may name one for what the run cannot tell")
    try:
        found = fit_run(facts_of(events), base[0], "run")
    except FitError as error:
        raise click.UsageError(f"--from-run: {error}") from error
    if not quiet:
        click.echo(_summary(found, name), err=True)
    return found.workload


def _summary(found: Fit, name: str) -> str:
    measured, workload = found.measured, found.workload
    switching = "without switching" if found.policy == "off" else f"with policy {found.policy}"
    mode, costs = workload.lengths.modes[0], workload.costs
    error_s, clipped = measured.get("wait_seconds_error"), measured.get("clip_ratio")
    return "\n".join(
        (
            f"{name}: {measured['steps']:.0f} steps {switching}",
            f"  a step trains {measured['training_seconds']:.0f} s and waits {measured['wait_seconds']:.0f} s"
            + ("" if error_s is None else f" (+- {error_s:.0f} s)"),
            f"  responses of {measured['response_tokens']:.0f} tokens"
            + ("" if clipped is None else f", {clipped:.1%} at the cap")
            + f" (log-deviation {mode.log_std:.2f}, {mode.between:.0%} of it between prompts)",
            f"  lend {costs.lend_s:.1f} s, reclaim {costs.reclaim_s:.1f} s, sync {costs.sync_s:.1f} s",
            f"  a token takes {workload.engine.base_s:.5f} s, and {workload.engine.per_request_s:.6f} s more a request",
            "  assumed: " + ("; ".join(found.assumed) or "nothing"),
        )
    )
