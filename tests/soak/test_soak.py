"""A soak of seconds for `make test`: the whole harness against a real buffer, with everything killed and torn."""

from __future__ import annotations

import asyncio

import pytest

from tests.soak.options import Rates, SoakOptions
from tests.soak.report import STUCK_S, Report
from tests.soak.world import Soak

SECONDS = 15.0
SEED = 20261129


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What the soak found; made once for all tests below."""
    directory = tmp_path_factory.mktemp("soak")
    options = SoakOptions(
        directory=directory,
        seconds=SECONDS,
        seed=SEED,
        workers=4,
        rates=Rates(kill_worker=2.5, kill_trainer=6.0, kill_service=6.0, stop_service=12.0, fill_disk=8.0, tear=0.4),
    )
    told: list[str] = []
    try:
        found = asyncio.run(Soak(options, told.append).run())
    finally:
        print(*told, sep="\n")
    print(found.to_text())
    assert not any((directory / "disk").iterdir()) or not found.small_disk, "the disk is mounted still"
    return found


@pytest.mark.timeout(180)
def test_h23_nothing_disappears_uncounted_whoever_is_killed(report: Report) -> None:
    """Nothing acknowledged is lost and nothing happens twice, with cut connections and no room on the disk as well."""
    assert report.wrongs == []
    assert report.committed
    assert report.audited


@pytest.mark.timeout(180)
def test_h57_who_lived_through_a_restart_goes_on_by_itself(report: Report) -> None:
    """A client that hangs after a restart holds a whole job; how long each took is what `make soak` reports."""
    assert report.service_lives > 1
    assert report.recovered_in
    assert report.recovered_in[-1] < STUCK_S
