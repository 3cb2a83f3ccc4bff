"""The bench of the buffer."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec

import pytest

from services.bench.buffer import FIGURES, measure
from services.bench.result import Result, Skipped


async def test_calls_are_measured_beside_the_same_bytes_on_a_bare_server() -> None:
    """A figure without its baseline says more about the machine than about the buffer."""
    wanted = ("depth_query", "wake_1", "wake_64_last", "finish_unary", "finish_stream", "payload_put", "payload_get")
    results = {result.name: result async for result in measure(wanted, quick=True)}
    assert results.keys() == set(wanted)
    for result in results.values():
        assert isinstance(result, Result)
        assert result.ratio is not None
        assert math.isfinite(result.ratio)
        assert result.value > 0


async def test_an_unknown_figure_is_refused() -> None:
    """A misspelt --only would measure nothing and look like success."""
    with pytest.raises(ValueError, match="no figure 'wake_2'"):
        await anext(measure(["wake_2"]))


async def test_a_peer_that_is_not_installed_is_skipped_by_name() -> None:
    """A figure that is silently missing looks as if nobody had asked for it."""
    if find_spec("transfer_queue") is not None:
        pytest.skip("TransferQueue is installed")
    skipped = [result async for result in measure(["payload_put_over_transferqueue"], quick=True)]
    assert [type(result) for result in skipped] == [Skipped]
    assert "transfer_queue" in json.loads(skipped[0].to_line())["skipped"]


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_every_figure_is_measured() -> None:
    """A figure that breaks is otherwise found when somebody wants the numbers."""
    assert {result.name async for result in measure(quick=True)} == set(FIGURES)
