"""Factors that change with the step.

Invariants: a factor is positive; the same profile and step always give the same factor.
"""

from __future__ import annotations

import math

from services.simulator.workload import Jump, Profile, Ramp, Steady, Wave


def factor(profile: Profile, step: int, steps: int) -> float:
    """The factor of `profile` at `step` of `steps`, both counted from 1. Steps before the first count as the first."""
    step = max(1, step)
    match profile:
        case Steady():
            return 1.0
        case Ramp(to=to):
            return float(to ** ((step - 1) / max(1, steps - 1)))
        case Jump(at=at, to=to):
            return to if step >= at else 1.0
        case Wave(shape="square", period=period, low=low, high=high):
            return high if (step - 1) % period < period / 2 else low
        case Wave(period=period, low=low, high=high):
            middle, swing = (high + low) / 2, (high - low) / 2
            return middle + swing * math.sin(2 * math.pi * (step - 1) / period)
    raise AssertionError(f"no such profile: {profile}")
