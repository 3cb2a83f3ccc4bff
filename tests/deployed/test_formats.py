"""A release meets what another one wrote: every file says its form, and is refused by number, in words, unchanged."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from services.buffer.storage.schema import SCHEMA as BUFFER
from services.engine.storage.schema import SCHEMA as ENGINE
from services.runtime.errors import Code
from services.runtime.journal.meta import Meta
from services.runtime.permissions import Role
from services.scheduler.storage.schema import SCHEMA as SCHEDULER
from tests.buffer.helpers import Caller, refused
from tests.deployed.site import RUN, SERVICES, Member, NotStarted, Site
from turnout.buffer.v1 import buffer_pb2
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, TrainerSetup

SCHEMAS = {"buffer": BUFFER, "engine": ENGINE, "scheduler": SCHEDULER}
OLDER, NEWER = "an older release wrote it", "a newer release wrote it"
UNCHANGED = "nothing was changed, and docs/operations.md says how to go on"


@pytest.fixture(scope="module")
def written(ground: Site) -> dict[str, Path]:
    """A data directory of each service, as its last life left it."""
    ground.start(*SERVICES)
    return {name: _left(ground.members[name]) for name in SERVICES}


def _left(member: Member) -> Path:
    assert member.stop() == 0
    assert member.data_dir is not None
    return member.data_dir


def _refused(ground: Site, service: str, data_dir: Path) -> str:
    """What a start on this directory says, which must change nothing in it."""
    member = ground.member(service, name=f"{service}-{data_dir.name}")
    member.arguments = [one if "--data-dir=" not in one else f"--data-dir={data_dir}" for one in member.arguments]
    before = _content(data_dir)
    with pytest.raises(NotStarted) as caught:
        member.start()
    assert caught.value.code == 1
    assert _content(data_dir) == before
    assert "Traceback" not in caught.value.errors
    return caught.value.errors.splitlines()[-1]


def _content(data_dir: Path) -> dict[str, str]:
    # The lock names whoever opened it last; SQLite leaves its index of the WAL, and an empty WAL, behind a reader.
    files = (path for path in sorted(data_dir.rglob("*")) if path.is_file() and path.stat().st_size)
    kept = (path for path in files if path.name not in ("journal.lock", "journal.db-shm"))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def _copy(written: dict[str, Path], service: str, to: Path) -> Path:
    return Path(shutil.copytree(written[service], to / f"copy-{service}"))


@pytest.mark.parametrize("service", ["buffer", *(pytest.param(one, marks=pytest.mark.slow) for one in SERVICES[1:])])
@pytest.mark.parametrize(
    ("step", "who"), [pytest.param(-1, OLDER, id="older", marks=pytest.mark.slow), pytest.param(1, NEWER, id="newer")]
)
def test_records_of_another_release_are_refused_by_name(
    ground: Site, written: dict[str, Path], tmp_path: Path, service: str, step: int, who: str
) -> None:
    """An operator who rolls back, or skips a release, has to learn which one can read the directory."""
    own = SCHEMAS[service]
    other = f"{service}/{int(own.rpartition('/')[2]) + step}"
    data_dir = _copy(written, service, tmp_path)
    with closing(sqlite3.connect(data_dir / "journal" / "journal.db", isolation_level=None)) as database:
        row = database.execute("SELECT journal_id, incarnation, snapshot_position, snapshot_crc FROM meta").fetchone()
        Meta(other, *row).store(database)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert _refused(ground, service, data_dir) == (
        f"turnout {service}: FAILED_PRECONDITION / JOURNAL_FORMAT: the journal has schema '{other}', and this release "
        f"reads '{own}': {who}; {UNCHANGED}"
    )
    told = json.loads(ground.turnout("doctor", "--json", "--data-dir", str(data_dir)).stdout)
    (found,) = [one for one in told["findings"] if one["check"] == "journal"]
    assert found["verdict"] == "problem"
    assert found["text"].startswith(f"{other} in format 1; this release reads ")


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(("number", "who"), [(0, OLDER), (2, NEWER)], ids=["older", "newer"])
def test_a_journal_of_another_form_is_refused_by_number(
    ground: Site, written: dict[str, Path], tmp_path: Path, service: str, number: int, who: str
) -> None:
    """What a form that nobody here knows holds besides its number is not looked at."""
    data_dir = _copy(written, service, tmp_path)
    with closing(sqlite3.connect(data_dir / "journal" / "journal.db", isolation_level=None)) as database:
        database.execute("UPDATE meta SET format = ?", (number,))
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert _refused(ground, service, data_dir) == (
        f"turnout {service}: FAILED_PRECONDITION / JOURNAL_FORMAT: the journal has format {number}, and this release "
        f"reads 1: {who}; {UNCHANGED}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(("number", "who"), [(0, OLDER), (2, NEWER)], ids=["older", "newer"])
def test_a_mark_of_another_form_is_refused_by_number(
    ground: Site, written: dict[str, Path], tmp_path: Path, service: str, number: int, who: str
) -> None:
    """It is read first, so its own number must not pass for damage."""
    data_dir = _copy(written, service, tmp_path)
    _renumber(data_dir / "journal" / "journal.mark", b"TNMARK", number)
    assert _refused(ground, service, data_dir) == (
        f"turnout {service}: FAILED_PRECONDITION / JOURNAL_FORMAT: the journal has mark format {number}, and this "
        f"release reads 1: {who}; {UNCHANGED}"
    )


def _renumber(path: Path, name: bytes, number: int) -> None:
    data = path.read_bytes()
    assert data.startswith(name)
    path.write_bytes(name + b"%02d" % number + data[len(name) + 2 :])


@pytest.mark.slow
def test_a_directory_of_another_service_is_refused(ground: Site, written: dict[str, Path], tmp_path: Path) -> None:
    """Two volumes that were exchanged in a manifest."""
    data_dir = _copy(written, "buffer", tmp_path)
    assert _refused(ground, "scheduler", data_dir) == (
        f"turnout scheduler: FAILED_PRECONDITION / JOURNAL_FORMAT: the journal has schema '{BUFFER}', and this release "
        f"reads '{SCHEDULER}': it is another service's; {UNCHANGED}"
    )


async def test_a_checkpoint_of_another_form_is_refused_and_its_run_goes_on(site: Site) -> None:
    """Rolled back to a checkpoint of before an upgrade: DATA_LOSS would say that the file is broken."""
    buffer = site.start("buffer").members["buffer"]
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create()
        await caller.finish_new("a", "b")
        for name, number, who in (("old", 1, OLDER), ("new", 3, NEWER)):
            await caller.checkpoint(name)
            assert buffer.data_dir is not None
            newest = max(buffer.data_dir.glob("checkpoints/*/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
            _renumber(newest, b"TNCKPT", number)
            for call in (caller.restore(name), caller.verify(name)):
                error = await refused(call)
                assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "CHECKPOINT_FORMAT")
                assert error.message == (
                    f"the checkpoint has format {number}, and this release reads 2: {who}; docs/operations.md says how "
                    "to go on"
                )
                assert error.metadata["value"] == name
            assert await caller.checkpoints() == []
        assert (await caller.depth()).sampleable == 2


def test_versions_and_doctor_tell_the_form_of_what_is_there(ground: Site, written: dict[str, Path]) -> None:
    """Before an upgrade one wants to know, and not to find out."""
    told = json.loads(ground.turnout("version", "--json").stdout)
    assert told["journals"] == [BUFFER, ENGINE, SCHEDULER]
    flags = [word for path in written.values() for word in ("--data-dir", str(path))]
    before = {name: _content(path) for name, path in written.items()}
    findings = json.loads(ground.turnout("doctor", "--json", *flags).stdout)["findings"]
    forms = {one["subject"]: (one["verdict"], one["text"]) for one in findings if one["check"] == "journal"}
    assert forms == {str(path): ("ok", f"{SCHEMAS[name]} in format 1") for name, path in written.items()}
    assert {name: _content(path) for name, path in written.items()} == before


@pytest.mark.slow
async def test_a_trainer_goes_on_with_its_own_checkpoint_on_services_that_begin_anew(site: Site) -> None:
    """The last step of a change-over, as docs/operations.md has it: empty directories, the step of the trainer."""
    site.start(*SERVICES)
    setup = TrainerSetup(
        RUN,
        scheduler_pb2.RunConfig(
            train_batch_size=2, parameter_sync_step=1, mini_batch_size=2, total_training_steps=9, group_size=1
        ),
        scheduler=site.members["scheduler"].target,
        buffer=site.members["buffer"].target,
        engine=site.members["engine"].target,
        buffer_config=buffer_pb2.RunConfig(train_batch_size=2),
        options=site.options(Role.TRAINER),
        resume=scheduler_pb2.Resume(resume_step=3, keep_live=True),
    )
    async with await AsyncTrainerHooks.open(setup) as hooks:
        assert hooks.next_step == 4
        assert await hooks.add_groups(4, [buffer_pb2.GroupSpec(group_id="g")]) == 1
