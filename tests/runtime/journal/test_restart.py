"""Opening a journal again."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from services.runtime.errors import Code, TurnoutError
from services.runtime.journal import Durability, JournalState
from services.runtime.journal.mark import read_mark
from services.runtime.journal.opening import Seams
from tests.runtime.journal.helpers import Faults, fill, image, opened, options, records_of


@pytest.mark.parametrize("level", [Durability.FSYNC, Durability.OS])
async def test_a_restart_finds_everything_and_goes_on(tmp_path: Path, level: Durability) -> None:
    """Positions must go on where they ended, under the same id and the next incarnation."""
    journal = await opened(tmp_path, options(level))
    made = await fill(journal, 5)
    named, incarnation = journal.id, journal.incarnation
    await journal.close()
    journal = await opened(tmp_path, options(level))
    assert (journal.id, journal.incarnation, journal.position) == (named, incarnation + 1, 5)
    assert journal.durable_position == 5
    made += await fill(journal, 5)
    assert await records_of(journal) == made
    await journal.close()


async def test_the_level_may_change_between_starts(tmp_path: Path) -> None:
    """An operator who turns fsync on must not have to give up the journal for it."""
    made = []
    for level in (Durability.OS, Durability.FSYNC, Durability.OS):
        journal = await opened(tmp_path, options(level))
        made += await fill(journal, 3)
        assert await records_of(journal) == made
        await journal.close()


async def test_two_services_never_open_one_journal(tmp_path: Path) -> None:
    """Both would commit under the same positions; the error names who has it."""
    journal = await opened(tmp_path)
    with pytest.raises(TurnoutError) as refused:
        await opened(tmp_path)
    assert (refused.value.code, refused.value.reason) == (Code.FAILED_PRECONDITION, "JOURNAL_LOCKED")
    assert refused.value.metadata["holder"].isdigit()
    await journal.append("s", b"still mine")
    await journal.close()
    journal = await opened(tmp_path)
    assert journal.position == 1
    await journal.close()


async def test_a_refused_opening_lets_go_of_the_lock(tmp_path: Path) -> None:
    """Otherwise the operator's second try, after mending, is refused by the first."""
    journal = await opened(tmp_path)
    await journal.close()
    for _ in range(2):
        with pytest.raises(TurnoutError, match="schema"):
            await opened(tmp_path, schema="other/1")
    journal = await opened(tmp_path)
    await journal.close()


async def test_a_cancelled_opening_lets_go_of_the_lock_once_it_is_over(tmp_path: Path) -> None:
    """Its thread goes on; a lock dropped under it would let two processes in."""
    faults = Faults()
    loop = asyncio.get_running_loop()
    begun, let_go = asyncio.Event(), threading.Event()

    def hold(sql: str) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert let_go.wait(20)

    faults.before = hold
    opening = asyncio.create_task(opened(tmp_path, seams=faults.seams()))
    await begun.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    with pytest.raises(TurnoutError, match="open in another service"):
        await opened(tmp_path)
    let_go.set()
    for _ in range(1000):
        try:
            journal = await opened(tmp_path)
            break
        except TurnoutError:
            await asyncio.sleep(0.01)
    await journal.append("s", b"x")
    await journal.close()


@pytest.mark.parametrize("found", [2, 0, "text"])
async def test_another_format_is_refused_by_its_number(tmp_path: Path, found: object) -> None:
    """A program that reads what it does not know loses what a newer one wrote."""
    journal = await opened(tmp_path)
    await journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        database.execute("UPDATE meta SET format = ?", (found,))
        database.execute("ALTER TABLE batches ADD COLUMN later TEXT")
        database.commit()
    before = (tmp_path / "journal.db").read_bytes()
    with pytest.raises(TurnoutError) as refused:
        await opened(tmp_path)
    assert (refused.value.code, refused.value.reason) == (Code.FAILED_PRECONDITION, "JOURNAL_FORMAT")
    assert (refused.value.metadata["value"], refused.value.metadata["supported"]) == (str(found), "1")
    assert (tmp_path / "journal.db").read_bytes() == before


async def test_another_owner_s_journal_is_refused(tmp_path: Path) -> None:
    """Two services given one data directory must not read each other's records."""
    journal = await opened(tmp_path, schema="buffer/1")
    await journal.close()
    with pytest.raises(TurnoutError) as refused:
        await opened(tmp_path, schema="scheduler/1")
    assert refused.value.reason == "JOURNAL_FORMAT"
    assert refused.value.metadata["value"] == "buffer/1"


async def test_a_creation_cut_short_is_finished(tmp_path: Path) -> None:
    """A crash in the first moments must not leave a directory that no start accepts."""
    whole = await opened(tmp_path / "whole")
    await whole.close()
    for present in ([], ["journal.lock"], ["journal.lock", "journal.mark"]):
        directory = tmp_path / f"cut-{len(present)}"
        directory.mkdir()
        for name in present:
            shutil.copy(tmp_path / "whole" / name, directory)
        if "journal.mark" in present:
            (directory / "journal.db").touch()
        elif present:
            (directory / "journal.mark").touch()
        journal = await opened(directory)
        await journal.append("s", b"x")
        assert journal.incarnation == 1
        await journal.close()


async def test_a_crash_between_commit_and_mark_is_no_loss(tmp_path: Path) -> None:
    """The mark may be behind the records, since it is raised after them."""
    journal = await opened(tmp_path / "live")
    await fill(journal, 3)
    mark = (tmp_path / "live" / "journal.mark").read_bytes()
    made = await records_of(journal) + await fill(journal, 1)
    crashed = image(tmp_path / "live", tmp_path / "crashed")
    await journal.close()
    (crashed / "journal.mark").write_bytes(mark)
    journal = await opened(crashed)
    assert await records_of(journal) == made
    said = read_mark(crashed / "journal.mark")
    assert said is not None
    assert said.position == 4
    await journal.close()


async def _tail_lost_by_power(directory: Path, level: Durability, boot: bytes) -> Path:
    """Return a journal of 5 records whose WAL lost the last 2, though they were acknowledged."""
    seams = Seams(boot_id=lambda: boot)
    journal = await opened(directory / "live", options(level), seams=seams)
    await fill(journal, 3)
    lost = image(directory / "live", directory / "lost")
    await fill(journal, 2)
    (lost / "journal.mark").write_bytes((directory / "live" / "journal.mark").read_bytes())
    await journal.close()
    return lost


async def test_what_power_loss_may_cost_under_os_is_reported(tmp_path: Path) -> None:
    """The level allows it, so the service starts; it must not pass in silence."""
    directory = await _tail_lost_by_power(tmp_path, Durability.OS, b"a" * 16)
    journal = await opened(directory, seams=Seams(boot_id=lambda: b"b" * 16))
    assert (journal.lost, journal.position) == (2, 3)
    await fill(journal, 1)
    await journal.close()
    journal = await opened(directory, seams=Seams(boot_id=lambda: b"b" * 16))
    assert (journal.lost, journal.position) == (0, 4)
    await journal.close()


@pytest.mark.parametrize(("level", "boot"), [(Durability.OS, b"a"), (Durability.FSYNC, b"b")])
async def test_a_lost_tail_is_refused_where_the_level_forbids_it(
    tmp_path: Path, level: Durability, boot: bytes
) -> None:
    """Without a restart of the machine, or under fsync, a missing end is damage: SQLite alone would say nothing."""
    directory = await _tail_lost_by_power(tmp_path, level, b"a" * 16)
    with pytest.raises(TurnoutError) as refused:
        await opened(directory, seams=Seams(boot_id=lambda: boot * 16))
    assert refused.value.code is Code.DATA_LOSS
    assert refused.value.metadata["last_good_position"] == "3"
    assert refused.value.metadata["acknowledged_position"] == "5"


async def test_only_a_failed_journal_is_opened_again(tmp_path: Path) -> None:
    """Reopening one that serves would drop what callers wait for."""
    journal = await opened(tmp_path)
    with pytest.raises(TurnoutError) as refused:
        await journal.reopen()
    assert refused.value.reason == "JOURNAL_NOT_FAILED"
    assert journal.state is JournalState.OPEN
    await journal.close()


def test_options_refuse_sizes_that_make_no_sense() -> None:
    """A checkpoint at 0 bytes would follow every commit, a negative ballast would be a negative file."""
    with pytest.raises(ValueError, match="ballast_bytes"):
        options(ballast_bytes=-1)
    with pytest.raises(ValueError, match="checkpoint_bytes"):
        options(checkpoint_bytes=0)
    with pytest.raises(ValueError, match="compact_bytes"):
        options(compact_bytes=-5)
