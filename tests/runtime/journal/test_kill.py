"""kill -9 in the middle of many appends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.journal import Durability
from tests.runtime.journal import appender
from tests.runtime.journal.helpers import opened, options, records_of, snapshot_of

ROOT = Path(__file__).parents[3]


def _killed_after(answers: int, directory: Path, level: Durability, compacting: bool) -> list[bytes]:
    """Run the appender, kill it in the middle, and return the payloads that it was told were durable."""
    command = [sys.executable, appender.__file__, str(directory), level.value, str(int(compacting))]
    with subprocess.Popen(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            told = [process.stdout.readline() for _ in range(answers)]
        finally:
            process.send_signal(signal.SIGKILL)
        told += process.stdout.read().splitlines(keepends=True)
    return [line.strip() for line in told if line.endswith(b"\n")]


@pytest.mark.parametrize(
    ("level", "compacting"),
    [(Durability.FSYNC, False), (Durability.OS, False), (Durability.OS, True), (Durability.FSYNC, True)],
)
async def test_every_answered_record_is_there_after_kill_9(tmp_path: Path, level: Durability, compacting: bool) -> None:
    """What was answered is there, in order and once, whether a commit, a checkpoint or a snapshot was under way."""
    told = _killed_after(400, tmp_path, level, compacting)
    assert len(told) >= 400
    journal = await opened(tmp_path, options(level))
    stored = await snapshot_of(journal) + [record.payload for record in await records_of(journal)]
    assert (journal.snapshot_position > 0) == compacting
    assert len(stored) == journal.position
    assert len(set(stored)) == len(stored)
    assert set(told) <= set(stored)
    for number in range(appender.CALLERS):
        own = [payload for payload in stored if payload.startswith(b"%d:" % number)]
        assert own == [b"%d:%d" % (number, count) for count in range(len(own))]
    await journal.close()


async def test_a_journal_survives_being_killed_again_and_again(tmp_path: Path) -> None:
    """Recovery itself must leave a file that the next recovery accepts."""
    before: list[bytes] = []
    for start in range(1, 4):
        _killed_after(50, tmp_path, Durability.OS, False)
        journal = await opened(tmp_path)
        stored = [record.payload for record in await records_of(journal)]
        assert journal.incarnation == 2 * start
        assert stored[: len(before)] == before
        assert len(stored) >= len(before) + 50
        before = stored
        await journal.close()
