"""The names under which a decision is logged.

Invariant: names are verl's, so that its dashboards go on working; a value that is not known yet has no name here. Only
a step's end with switching on is logged; every other decision has no metrics.
"""

from services.scheduler.policies.types import Decision

_NAMES = {
    "separate_async/switch/threshold_ratio": "threshold_ratio",
    "separate_async/switch/wait_samples": "wait_samples",
    "separate_async/switch/idle": "idle",
    "separate_async/decision/sampleable_count": "sampleable_count",
    "separate_async/decision/remaining": "remaining",
    "separate_async/decision/should_switch_to_rollout": "should_switch_to_rollout",
    "separate_async/decision/per_sample_time_seconds": "per_sample_time_seconds",
    "separate_async/decision/effective_switch_cost_seconds": "effective_switch_cost_seconds",
    "separate_async/decision/benefit_seconds": "benefit_seconds",
}


def decision_metrics(decision: Decision) -> dict[str, float]:
    """Metric name to value, empty unless `decision` was taken at a step's end with switching on."""
    if "should_switch_to_rollout" not in decision.numbers:
        return {}
    return {metric: decision.numbers[key] for metric, key in _NAMES.items() if key in decision.numbers}
