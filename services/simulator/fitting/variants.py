"""The error band of a fit: the same run under other assumptions, each fitted again.

Invariant: every variant waits as the run did, except the two that stand for the error of that measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.simulator.fitting.calibrate import Fit, match_wait
from services.simulator.workload import Workload

# What lengths of reasoning models were seen to spread, and how alike answers to one prompt are.
_LOG_STD = 0.2
_LEAST_BETWEEN, _MOST_BETWEEN = 0.5, 0.95
_PREFILL = 4.0
NAMES = ("less-wait", "more-wait", "alike-lengths", "spread-lengths", "unlike-members", "alike-members", "slow-prefill")


def variants(fit: Fit, skip: int, progress: Callable[[int], None] | None = None) -> tuple[Workload, ...]:
    """Fitted workloads under other assumptions, named after what differs. `skip`: first steps that are not compared."""
    wait_s, error_s = fit.measured["wait_seconds"], fit.measured["wait_seconds_error"]
    waits = {"less-wait": max(wait_s - 2 * error_s, 0.0), "more-wait": wait_s + 2 * error_s}
    return tuple(
        match_wait(workload, fit.policy, waits.get(kind, wait_s), skip, [], progress).model_copy(
            update={"name": f"{fit.workload.name}-{kind}"}
        )
        for kind, workload in _others(fit.workload)
    )


def _others(workload: Workload) -> Iterator[tuple[str, Workload]]:
    yield NAMES[0], workload
    yield NAMES[1], workload
    mode = workload.lengths.modes[0]
    yield NAMES[2], _modes(workload, log_std=-_LOG_STD)
    yield NAMES[3], _modes(workload, log_std=_LOG_STD)
    yield NAMES[4], _modes(workload, between=min(_LEAST_BETWEEN, mode.between))
    yield NAMES[5], _modes(workload, between=max(_MOST_BETWEEN, mode.between))
    engine = workload.engine
    slower = engine.model_copy(update={"prefill_tokens_per_s": engine.prefill_tokens_per_s / _PREFILL})
    yield NAMES[6], workload.model_copy(update={"engine": slower})


def _modes(workload: Workload, *, log_std: float = 0.0, between: float | None = None) -> Workload:
    modes = tuple(
        mode.model_copy(
            update={
                "log_std": min(max(mode.log_std + log_std, 0.05), 3.0),
                "between": mode.between if between is None else between,
            }
        )
        for mode in workload.lengths.modes
    )
    return workload.model_copy(update={"lengths": workload.lengths.model_copy(update={"modes": modes})})
