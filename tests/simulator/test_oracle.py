"""The oracle: an upper reference has to be one."""

from services.simulator import load, simulate
from services.simulator.oracle import oracle

SMALL = load("tiny-batch").model_copy(update={"steps": 15})


def test_oracle_is_faster_than_every_policy() -> None:
    """A reference below what policies reach would call them perfect. Policies may win by a little (see the module)."""
    best = oracle(SMALL, 0)
    for policy in ("off", "verl", "jit"):
        assert best.hours < simulate(SMALL, policy, 0).hours * 1.002


def test_oracle_never_loses_to_not_lending() -> None:
    """Where lending has nothing to gain the oracle has to find that out."""
    workload = load("train-bound").model_copy(update={"steps": 4})
    assert oracle(workload, 0).hours <= simulate(workload, "off", 0).hours


def test_a_wider_search_is_repeatable() -> None:
    """Same seed, same schedule."""
    assert oracle(SMALL, 1, beam=2) == oracle(SMALL, 1, beam=2)
