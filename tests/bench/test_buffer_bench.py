"""The bench of the buffer."""

from __future__ import annotations

import math

import pytest

from services.bench.buffer import FIGURES, measure


async def test_calls_are_measured_beside_the_same_bytes_on_a_bare_server() -> None:
    """A figure without its baseline says more about the machine than about the buffer."""
    wanted = ("depth_query", "wake_1", "wake_64_last", "finish_unary", "finish_stream", "payload_put", "payload_get")
    results = {result.name: result async for result in measure(wanted, quick=True)}
    assert results.keys() == set(wanted)
    for result in results.values():
        assert result.ratio is not None
        assert math.isfinite(result.ratio)
        assert result.value > 0


async def test_an_unknown_figure_is_refused() -> None:
    """A misspelt --only would measure nothing and look like success."""
    with pytest.raises(ValueError, match="no figure 'wake_2'"):
        await anext(measure(["wake_2"]))


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_every_figure_is_measured() -> None:
    """A figure that breaks is otherwise found when somebody wants the numbers."""
    assert {result.name async for result in measure(quick=True)} == set(FIGURES)
