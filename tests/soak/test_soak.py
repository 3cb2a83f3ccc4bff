"""A soak of seconds for `make test`: the whole harness against a real buffer, with everything killed and torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.options import Rates, SoakOptions
from tests.soak.world import Soak

SECONDS = 12.0
SEED = 20261129


@pytest.mark.timeout(240)
async def test_h23_nothing_disappears_uncounted_whoever_is_killed(tmp_path: Path) -> None:
    """Nothing acknowledged is lost and nothing happens twice, with cut connections and no room on the disk as well."""
    told: list[str] = []
    options = SoakOptions(
        directory=tmp_path,
        seconds=SECONDS,
        seed=SEED,
        workers=4,
        rates=Rates(kill_worker=3.0, kill_trainer=6.0, kill_service=5.0, stop_service=9.0, fill_disk=6.0, tear=0.4),
    )
    report = await Soak(options, told.append).run()
    assert report.passed, "\n".join([report.to_text(), *told])
    assert report.service_lives > 1
    assert not report.small_disk or not any((tmp_path / "disk").iterdir()), "the disk is mounted still"
