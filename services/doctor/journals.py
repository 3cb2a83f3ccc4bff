"""What a service wrote into a data directory, and whether this release reads it.

Invariants: nothing is changed, also beside a service that runs; what cannot be read says so and is no format.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from services.buffer.storage.schema import SCHEMA as BUFFER
from services.doctor.finding import Finding, ok, problem
from services.engine.storage.schema import SCHEMA as ENGINE
from services.runtime.journal.files import JournalFiles
from services.runtime.journal.meta import FORMAT
from services.scheduler.storage.schema import SCHEMA as SCHEDULER

SCHEMAS: Final = (BUFFER, ENGINE, SCHEDULER)

_GO_ON: Final = "start the release that wrote it; docs/operations.md says how to go on with this one"


def check_journal(data_dir: Path) -> Iterator[Finding]:
    """Say which format the journal in `data_dir` has; nothing where there is none."""
    files = JournalFiles(data_dir / "journal")
    subject = str(data_dir)
    try:
        if not files.database.exists() or files.database.stat().st_size == 0:
            return
        number, schema = _head(files)
    except (OSError, sqlite3.Error) as error:
        yield problem("journal", subject, f"cannot be read: {error}", "look at it as the service's user, and its log")
        return
    text = f"{schema} in format {number}"
    if number != FORMAT or schema not in SCHEMAS:
        reads = f"{', '.join(SCHEMAS)} in format {FORMAT}"
        yield problem("journal", subject, f"{text}; this release reads {reads}", _GO_ON)
    else:
        yield ok("journal", subject, text)


def _head(files: JournalFiles) -> tuple[object, object]:
    # Without a WAL nobody has it open, and SQLite would make files beside it; with one, the WAL is part of it.
    how = "mode=ro" if files.wal.exists() else "mode=ro&immutable=1"
    uri = f"{files.database.absolute().as_uri()}?{how}"
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=1.0)) as connection:
        row = connection.execute("SELECT format, schema FROM meta").fetchone()
    if row is None:
        raise sqlite3.DatabaseError("its head row is missing")
    return row[0], row[1]
