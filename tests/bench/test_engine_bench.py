"""The engine bench runs, and its figures are those that are asked for."""

from __future__ import annotations

import pytest

from services.bench.engine import FIGURES, measure


@pytest.mark.timeout(120)
async def test_calls_requests_and_a_reclaim_are_measured_beside_the_agent() -> None:
    """Both sides do the work: neither value is zero, and a reclaim takes at least what its engine takes."""
    deaths = {"idle_death_of_an_engine", "idle_death_of_an_agent"}
    wanted = {"engine_pause", "generate_8", "reclaim", *deaths}
    results = {result.name: result async for result in measure(wanted, quick=True)}
    assert results.keys() == wanted
    assert all(result.value > 0 and (name in deaths or result.baseline > 0) for name, result in results.items())
    assert all(result.limit is not None for result in results.values())
    assert results["reclaim"].value >= 500
    assert results["reclaim"].baseline >= 500


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_hung_replica_delays_no_other() -> None:
    """All figures, with what can be said of them on any machine: waiting for the hung one would take 2 s."""
    results = {result.name: result async for result in measure(quick=True)}
    assert results.keys() == set(FIGURES)
    assert results["fan_out_64_one_hung"].value < 2000
