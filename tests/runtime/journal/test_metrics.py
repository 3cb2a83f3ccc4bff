"""What a journal tells of its commits."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from services.runtime.errors import TurnoutError
from services.runtime.journal import Durability, Journal
from services.runtime.journal.metrics import JournalMetrics
from tests.runtime.journal.helpers import Faults, fill, opened, options


def figures(journal: Journal) -> dict[str, float]:
    families: list[Metric] = JournalMetrics(lambda: journal).read()
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


@pytest.mark.parametrize("durability", [Durability.OS, Durability.FSYNC])
async def test_every_commit_is_counted_with_its_time_and_bytes(tmp_path: Path, durability: Durability) -> None:
    """Commits on the event loop and those of the writer's thread: the slow ones are the ones to see."""
    journal = await opened(tmp_path, options(durability))
    await fill(journal, 5, size=1000)
    journal.append("s", b"x")
    await journal.append("s", b"y")
    told = figures(journal)
    assert told["turnout_journal_commit_seconds_count"] == 6
    assert told["turnout_journal_commit_seconds_sum"] > 0
    assert told["turnout_journal_records_total"] == 7
    assert 5000 < told["turnout_journal_committed_bytes_total"] < 6000
    assert told["turnout_journal_pending_records"] == 0
    assert told["turnout_journal_open"] == 1
    await journal.close()


async def test_a_journal_that_failed_is_seen_as_not_open(tmp_path: Path) -> None:
    """The alert on a full disk rests on it."""
    faults = Faults()
    journal = await opened(tmp_path, options(Durability.FSYNC), seams=faults.seams())
    faults.fail("INSERT INTO batches", sqlite3.SQLITE_IOERR)
    with pytest.raises(TurnoutError):
        await journal.append("s", b"x")
    told = figures(journal)
    assert told["turnout_journal_open"] == 0
    assert told["turnout_journal_commit_seconds_count"] == 0
    await journal.close()


async def test_without_a_journal_there_are_no_figures() -> None:
    """Zeros would read as a journal in which nothing happens."""
    assert JournalMetrics(lambda: None).read() == []
