"""`turnout simulate --from-verl-metrics`: a run's own workload, and its variants under other assumptions.

Invariant: what was measured and what is assumed is said on stderr, so that nobody takes an assumption for a finding.
"""

from __future__ import annotations

from pathlib import Path

import click

from services.cli.progress import progress_bar
from services.simulator import Workload
from services.simulator.fitting import NAMES, SEARCH_STEPS, Fit, FitError, LogError, fit, read, variants

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
        click.echo(_summary(found, path), err=True)
    return [found.workload, *others]


def _summary(found: Fit, path: Path) -> str:
    measured, workload = found.measured, found.workload
    switching = "with switching on" if found.policy == "verl" else "without switching"
    mode, costs = workload.lengths.modes[0], workload.costs
    return "\n".join(
        (
            f"{path.name}: {measured['steps']:.0f} steps {switching}",
            f"  a step trains {measured['training_seconds']:.0f} s and waits {measured['wait_seconds']:.0f} s "
            f"(+- {measured['wait_seconds_error']:.0f} s) for rollouts",
            f"  responses of {measured['response_tokens']:.0f} tokens, {measured['clip_ratio']:.1%} at the cap "
            f"(log-deviation {mode.log_std:.2f})",
            f"  lend {costs.lend_s:.1f} s, reclaim {costs.reclaim_s:.1f} s, sync {costs.sync_s:.1f} s",
            f"  a token takes {workload.engine.base_s:.5f} s, and {workload.engine.per_request_s:.6f} s more a request",
            "  assumed: " + "; ".join(found.assumed),
        )
    )
