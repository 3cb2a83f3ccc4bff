"""Manifest metrics: how old the trajectories of a batch are, under verl's names.

During step s engines hold version s - 1. Per trajectory, over the weight versions of its segments (as in verl 0.9.1,
`trainer_base.py`): spans = max - min + 1, staleness = (s - 1) - max, staleness_worst = (s - 1) - min.
"""

from collections.abc import Iterable

from services.buffer.domain.group import Group


def trajectory_metrics(groups: Iterable[Group], step: int) -> dict[str, float]:
    """Mean, max and min of each figure over the trajectories with a known version; empty if there are none."""
    bounds = [versions for group in groups for versions in group.versions]
    if not bounds:
        return {}
    figures = {
        "trajectory_spans": [high - low + 1 for low, high in bounds],
        "trajectory_staleness": [step - 1 - high for _, high in bounds],
        "trajectory_staleness_worst": [step - 1 - low for low, _ in bounds],
    }
    metrics: dict[str, float] = {}
    for name, values in figures.items():
        prefix = f"training/off_policy/{name}"
        metrics[f"{prefix}/mean"] = sum(values) / len(values)
        metrics[f"{prefix}/max"] = max(values)
        metrics[f"{prefix}/min"] = min(values)
    return metrics
