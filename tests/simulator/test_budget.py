"""How long a simulation may take: processor time of one core, not wall clock."""

import time

import pytest

from services.simulator import load, simulate


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("policy", "seconds"), [("verl", 1.0), ("jit", 8.0)])
def test_150_calibrated_steps(policy: str, seconds: float) -> None:
    """A study of twenty workloads has to fit into a lunch break. The faster of two, since machines are shared."""
    took = []
    for seed in range(2):
        began = time.process_time()
        simulate(load("calibrated"), policy, seed)
        took.append(time.process_time() - began)
    assert min(took) < seconds
