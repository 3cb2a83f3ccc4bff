"""What a lend is worth.

Invariant: a gain that is not larger than its cost is no gain; a gain or a cost nobody measured yet is worth a try.
"""


def scaling_factor(hybrid_gpus: int, standalone_gpus: int) -> float:
    """How much faster all GPUs generate than the standalone ones: (hybrid + standalone) / standalone, at least 1.

    `standalone_gpus` is at least 1 (a run that switches has some).
    """
    return (hybrid_gpus + standalone_gpus) / standalone_gpus


def benefit_seconds(remaining: int, seconds_per_group: float, scaling: float) -> float:
    """Waiting saved by lending: remaining x seconds_per_group x (1 - 1 / scaling). Source: verl 0.9.1, on_step_end."""
    return remaining * seconds_per_group * (1.0 - 1.0 / scaling)


def pays(benefit_s: float | None, cost_s: float | None) -> bool:
    """Whether to lend, as far as seconds go. None is "not known yet"."""
    return benefit_s is None or cost_s is None or benefit_s > cost_s
