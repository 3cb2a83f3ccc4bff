"""The bench of the journal."""

from __future__ import annotations

import math
import os
from pathlib import Path

from services.bench.journal import CALLERS, measure


async def test_every_durability_is_measured_beside_its_baselines(memory_dir: Path) -> None:
    """A figure without its baseline says more about the machine than about the journal."""
    results = {result.name: result for result in await measure(memory_dir, 0.01, 1)}
    for level in ("fsync", "os", "none"):
        for callers in CALLERS:
            for store in ("nothing",) if level == "none" else ("file", "sqlite"):
                result = results[f"journal_{level}_{callers}_appends_over_{store}"]
                assert result.unit == "1/s"
                assert result.ratio is not None
                assert math.isfinite(result.ratio)
                assert result.value > 0
    assert {"journal_fsync_loop_block_max", "journal_os_loop_block_max"} <= results.keys()
    assert os.listdir(memory_dir) == []
