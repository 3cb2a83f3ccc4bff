"""Zero variance: whether all rewards of a group are the same, so that it teaches nothing (the DAPO filter).

Invariants: a single value never is; equality survives float rounding, and +0.0 equals -0.0. verl asks for a standard
deviation of exactly 0, which 0.1 + 0.2 beside 0.3 would escape.
"""

from collections.abc import Sequence

# Sums of a few thousand token rewards in different orders differ by less than 1e-12 of their magnitude in doubles; real
# differences between rewards are far above 1e-9 of it.
RELATIVE_TOLERANCE = 1e-9
# For values that should be 0 and are a rounding error around it.
ABSOLUTE_TOLERANCE = 1e-12


def zero_variance(values: Sequence[float]) -> bool:
    """Whether there are several finite values and all are equal up to rounding."""
    if len(values) < 2:
        return False
    low, high = min(values), max(values)
    return high - low <= RELATIVE_TOLERANCE * max(abs(low), abs(high)) + ABSOLUTE_TOLERANCE
