"""Damaged files: DATA_LOSS with the last good position, or an exact replay; never silence."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from services.runtime.errors import Code, TurnoutError
from services.runtime.journal import Record
from tests.runtime.journal.helpers import chunked, fill, image, opened, records_of, snapshot_of

SNAPSHOT_AT = 10
IN_DATABASE = 20
LAST = 30
CHUNKS = [b"first chunk", b"", b"x" * 300]


async def _crashed(directory: Path) -> tuple[Path, list[Record]]:
    """Return a killed journal with a snapshot at 10, records 11 to 20 in the database and 21 to 30 in the WAL."""
    journal = await opened(directory / "live")
    await fill(journal, SNAPSHOT_AT, 3000)
    await journal.snapshot(SNAPSHOT_AT, chunked(CHUNKS))
    await fill(journal, IN_DATABASE - SNAPSHOT_AT, 3000)
    await journal.close()  # copies the WAL
    journal = await opened(directory / "live")
    await fill(journal, LAST - IN_DATABASE, 3000)
    records = await records_of(journal)
    crashed = image(directory / "live", directory / "crashed")
    await journal.close()
    return crashed, records


async def _outcome(directory: Path) -> tuple[list[Record], list[bytes]] | TurnoutError:
    """Open and read everything; after a clean reading, append and read again, as a service would."""
    try:
        journal = await opened(directory)
    except TurnoutError as error:
        return error
    try:
        found = await records_of(journal), await snapshot_of(journal)
        more = await fill(journal, 2, 9000)
    finally:
        await journal.close()
    journal = await opened(directory)
    assert await records_of(journal) == found[0] + more
    await journal.close()
    return found


def _flip(path: Path, offset: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


async def test_a_flipped_byte_anywhere_is_found_or_does_no_harm(memory_dir: Path) -> None:
    """SQLite takes the part of a WAL before the damage for the whole, and returns damaged blobs as they are."""
    crashed, records = await _crashed(memory_dir)
    names = ["journal.db", "journal.db-wal", "journal.mark", f"snapshot-{SNAPSHOT_AT:020d}"]
    chosen = random.Random(7)
    found: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for name in names:
        size = (crashed / name).stat().st_size
        assert size > 0
        offsets = {*range(0, size, max(1, size // 90)), *range(min(size, 30)), *(chosen.sample(range(size), 20))}
        for offset in sorted(offsets):
            tried[name] += 1
            victim = memory_dir / "victim"
            shutil.copytree(crashed, victim)
            _flip(victim / name, offset, chosen.choice([0x01, 0x80, 0xFF]))
            outcome = await _outcome(victim)
            if isinstance(outcome, TurnoutError):
                assert outcome.reason in ("JOURNAL_DAMAGED", "JOURNAL_FORMAT"), (name, offset, outcome)
                if outcome.reason == "JOURNAL_DAMAGED":
                    assert outcome.code is Code.DATA_LOSS
                    assert 0 <= int(outcome.metadata["last_good_position"]) <= LAST, (name, offset)
                found[name] += 1
            else:
                assert outcome == (records, CHUNKS), (name, offset)
            shutil.rmtree(victim)
    # What nobody reads may be damaged without harm: free pages, reserved bytes. The rest has to be noticed.
    for name in names[1:]:
        assert found[name] == tried[name], name
    assert found["journal.db"] > 50


def _drop_row(first: int) -> Callable[[sqlite3.Connection], object]:
    return lambda database: database.execute("DELETE FROM batches WHERE first = ?", (first,))


def _spoil_body(first: int) -> Callable[[sqlite3.Connection], object]:
    change = "UPDATE batches SET body = substr(body, 1, 50) || x'00' || substr(body, 52) WHERE first = ?"
    return lambda database: database.execute(change, (first,))


def _swap(one: int, other: int) -> Callable[[sqlite3.Connection], object]:
    def swap(database: sqlite3.Connection) -> None:
        rows = {row[0]: row for row in database.execute("SELECT * FROM batches")}
        for first, source in ((one, other), (other, one)):
            database.execute("UPDATE batches SET body = ?, crc = ? WHERE first = ?", (*rows[source][4:2:-1], first))

    return swap


def _statement(sql: str) -> Callable[[sqlite3.Connection], object]:
    return lambda database: database.execute(sql)


@pytest.mark.parametrize(
    ("change", "last_good"),
    [
        (_drop_row(15), 14),
        (_drop_row(11), 10),
        (_drop_row(30), 29),
        (_spoil_body(17), 16),
        (_swap(13, 14), 12),
        (_statement("UPDATE batches SET count = 2 WHERE first = 15"), 14),
        (_statement("UPDATE batches SET first = 40 WHERE first = 30"), 29),
        (_statement("DELETE FROM batches"), 10),
        (_statement("UPDATE batches SET body = 'text' WHERE first = 20"), 19),
        (_statement("DELETE FROM meta"), 0),
        (_statement("UPDATE meta SET incarnation = 1"), 0),
        (_statement("UPDATE meta SET snapshot_position = 0"), 0),
        (_statement("CREATE TABLE other (x)"), 0),
        (_statement("DROP TABLE batches"), 0),
    ],
)
async def test_damage_names_the_last_good_position_and_changes_nothing(
    memory_dir: Path, change: Callable[[sqlite3.Connection], object], last_good: int
) -> None:
    """An operator decides by that position whether the training can go on; the evidence must stay for them."""
    crashed, _ = await _crashed(memory_dir)
    with closing(sqlite3.connect(crashed / "journal.db")) as database:
        change(database)
        database.commit()
    before = {path.name: path.read_bytes() for path in crashed.iterdir() if path.suffix != ".db-shm"}
    for _ in range(2):
        with pytest.raises(TurnoutError) as refused:
            await opened(crashed)
        assert (refused.value.code, refused.value.reason) == (Code.DATA_LOSS, "JOURNAL_DAMAGED")
        assert refused.value.metadata["last_good_position"] == str(last_good)
    after = {path.name: path.read_bytes() for path in crashed.iterdir()}
    for name in ("journal.db", "journal.mark", f"snapshot-{SNAPSHOT_AT:020d}"):
        assert after[name] == before[name], name


@pytest.mark.parametrize(
    ("name", "last_good"),
    [("journal.db", 0), ("journal.db-wal", 20), ("journal.mark", 30), (f"snapshot-{SNAPSHOT_AT:020d}", 0)],
)
@pytest.mark.parametrize("left", [None, 0, 0.5])
async def test_a_file_that_is_missing_or_cut_short_is_never_silence(
    memory_dir: Path, name: str, last_good: int, left: float | None
) -> None:
    """A start from nothing, or from an older end, would look like a healthy one."""
    crashed, _ = await _crashed(memory_dir)
    path = crashed / name
    if left is None:
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * left)])
    with pytest.raises(TurnoutError) as refused:
        await opened(crashed)
    assert refused.value.code is Code.DATA_LOSS
    if not left:
        assert refused.value.metadata["last_good_position"] == str(last_good)
    if left is None and name != "journal.db":
        assert (crashed / "journal.db").exists()


async def test_a_torn_commit_that_was_never_acknowledged_is_no_damage(memory_dir: Path) -> None:
    """kill -9 in the middle of a write leaves half a commit at the end of the WAL."""
    journal = await opened(memory_dir / "live")
    made = await fill(journal, 5, 3000)
    mark = (memory_dir / "live" / "journal.mark").read_bytes()
    whole = (memory_dir / "live" / "journal.db-wal").stat().st_size
    await fill(journal, 1, 60_000)
    crashed = image(memory_dir / "live", memory_dir / "crashed")
    await journal.close()
    (crashed / "journal.mark").write_bytes(mark)
    torn = (crashed / "journal.db-wal").read_bytes()
    for length in (whole + 10, whole + 5000, len(torn) - 1):
        (crashed / "journal.db-wal").write_bytes(torn[:length])
        again = image(crashed, memory_dir / f"torn-{length}")
        journal = await opened(again)
        assert await records_of(journal) == made
        await journal.close()


async def test_damage_within_the_wal_is_refused_and_the_wal_kept(memory_dir: Path) -> None:
    """SQLite would drop what follows the damage, and delete the WAL when the last connection closes."""
    crashed, _ = await _crashed(memory_dir)
    wal = crashed / "journal.db-wal"
    _flip(wal, wal.stat().st_size // 2, 0xFF)
    before = wal.read_bytes()
    for _ in range(2):
        with pytest.raises(TurnoutError) as refused:
            await opened(crashed)
        assert IN_DATABASE < int(refused.value.metadata["last_good_position"]) < LAST
        assert refused.value.metadata["acknowledged_position"] == str(LAST)
    assert wal.read_bytes() == before


async def test_a_damaged_list_of_free_pages_is_refused(memory_dir: Path) -> None:
    """Every record is still there, but the next commits would be written over some of them."""
    journal = await opened(memory_dir)
    await fill(journal, 20, 9000)
    await journal.snapshot(10, chunked([b"10"]))
    await journal.close()
    path = memory_dir / "journal.db"
    data = bytearray(path.read_bytes())
    page_size = int.from_bytes(data[16:18], "big")
    trunk = (int.from_bytes(data[32:36], "big") - 1) * page_size
    assert int.from_bytes(data[trunk + 4 : trunk + 8], "big") > 0, "a list without pages shows nothing"
    root = 2
    data[trunk + 8 : trunk + 12] = root.to_bytes(4, "big")
    path.write_bytes(data)
    with pytest.raises(TurnoutError) as refused:
        await opened(memory_dir)
    assert refused.value.code is Code.DATA_LOSS
    assert refused.value.metadata["last_good_position"] == "20"


async def test_an_older_copy_of_the_database_is_refused(memory_dir: Path) -> None:
    """Restoring a backup over the live file takes back answers that were given."""
    journal = await opened(memory_dir / "live")
    await fill(journal, 3)
    await journal.close()
    older = (memory_dir / "live" / "journal.db").read_bytes()
    journal = await opened(memory_dir / "live")
    await fill(journal, 3)
    await journal.close()
    (memory_dir / "live" / "journal.db").write_bytes(older)
    with pytest.raises(TurnoutError) as refused:
        await opened(memory_dir / "live")
    assert refused.value.metadata["last_good_position"] == "3"


async def test_another_journal_s_database_is_refused(memory_dir: Path) -> None:
    """Two directories mixed up can fit by their positions."""
    for name in ("one", "other"):
        journal = await opened(memory_dir / name)
        await fill(journal, 3)
        await journal.close()
    shutil.copy(memory_dir / "one" / "journal.db", memory_dir / "other" / "journal.db")
    with pytest.raises(TurnoutError, match="another journal"):
        await opened(memory_dir / "other")


async def test_damage_met_while_serving_is_told_to_the_reader(memory_dir: Path) -> None:
    """A watcher's replay must not end early as if there were nothing more."""
    journal = await opened(memory_dir / "live")
    await fill(journal, 10)
    with closing(sqlite3.connect(memory_dir / "live" / "journal.db")) as database:
        _drop_row(6)(database)
        database.commit()
    with pytest.raises(TurnoutError) as refused:
        await records_of(journal)
    assert refused.value.code is Code.DATA_LOSS
    assert refused.value.metadata["last_good_position"] == "5"
    await journal.close()
