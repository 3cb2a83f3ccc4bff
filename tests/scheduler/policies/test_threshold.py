"""The threshold formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policies.threshold import switch_threshold


@pytest.mark.parametrize(
    ("ratio", "batch", "mini_batch", "expected"),
    [
        pytest.param(0.5, 5, 1, 2, id="half-to-even-down"),
        pytest.param(0.5, 7, 1, 4, id="half-to-even-up"),
        pytest.param(0.1, 3, 0, 1, id="batch-smaller-than-its-sync-steps"),
        pytest.param(0.4, 64, 16, 26, id="published-setting"),
        pytest.param(1e-9, 64, 16, 16, id="tiny-ratio-stops-at-the-mini-batch"),
        pytest.param(1e-9, 64, 0, 1, id="tiny-ratio-without-a-mini-batch"),
        pytest.param(0.4, 1, 1, 1, id="batch-of-one"),
        pytest.param(1.0, 2**31 - 1, 1, 2**31 - 1, id="largest-batch"),
        pytest.param(0.4, 2**31 - 1, 1, 858993459, id="large-batch"),
        pytest.param(1.0, 64, 16, 64, id="whole-batch"),
        pytest.param(1.0, 64, 64, 64, id="one-mini-batch-per-step"),
    ],
)
def test_h46_threshold_rounds_half_to_even_and_never_falls_below_one(
    ratio: float, batch: int, mini_batch: int, expected: int
) -> None:
    """A threshold of 0 would end every lend before a group was generated."""
    assert switch_threshold(ratio, batch, mini_batch) == expected


@given(
    ratio=st.floats(min_value=0, max_value=1, exclude_min=True),
    batch=st.integers(1, 2**31 - 1),
    mini_batch=st.integers(0, 2**31 - 1),
)
def test_h46_threshold_lies_between_one_and_the_batch(ratio: float, batch: int, mini_batch: int) -> None:
    """A threshold above the batch is one the buffer may never reach."""
    threshold = switch_threshold(ratio, batch, mini_batch)
    assert 1 <= threshold <= batch
    assert threshold >= min(mini_batch, batch)
