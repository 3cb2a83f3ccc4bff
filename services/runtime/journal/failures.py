"""What can go wrong with a journal, as the errors of Turnout.

Invariants: every error of SQLite and of the system falls into one cause; a failed fsync is its own cause, since only it
obliges the process to exit.

Why exit: when fsync fails, Linux marks the pages clean all the same, so the next fsync reports success for bytes that
never reached the disk, and reading them back shows the copy in memory ("fsyncgate"). Nothing that this process does
afterwards can tell what is on disk. A new process opens the journal, rewrites what the WAL holds and syncs that anew.
"""

from __future__ import annotations

import errno
import sqlite3
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from services.runtime.errors import (
    TurnoutError,
    aborted,
    data_loss,
    describe,
    failed_precondition,
    internal,
    resource_exhausted,
    unavailable,
)

_FSYNC_CODES: Final = frozenset({sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC})
_DAMAGE_CODES: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_INACCESSIBLE_CODES: Final = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_AUTH,
    }
)
_PRIMARY: Final = 0xFF
"""SQLite keeps the primary result code in the low byte of an extended one."""


FSYNC_REASON: Final = "JOURNAL_FSYNC_FAILED"
"""The reason of the one failure after which the process must exit."""


class Cause(Enum):
    """Why something failed."""

    DISK_FULL = auto()
    FSYNC = auto()
    DAMAGE = auto()
    IO = auto()
    FAULT = auto()
    """An error of the program."""


@dataclass(frozen=True, slots=True)
class JournalFailure:
    """Why a journal stopped accepting records.

    `fatal`: the process must exit; otherwise the owner drops its memory, calls `reopen` and loads again.
    """

    error: TurnoutError
    fatal: bool


def cause_of(error: BaseException) -> Cause:
    """Return the cause that an error of SQLite or of the system falls into."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            return Cause.FAULT
        if code in _FSYNC_CODES:
            return Cause.FSYNC
        if code & _PRIMARY == sqlite3.SQLITE_FULL:
            return Cause.DISK_FULL
        return Cause.DAMAGE if code & _PRIMARY in _DAMAGE_CODES else Cause.IO
    if isinstance(error, OSError):
        return Cause.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else Cause.IO
    return Cause.FAULT


def failure_of(error: BaseException) -> JournalFailure:
    """Return what a failed commit or checkpoint means for the journal and for those who wait."""
    if isinstance(error, TurnoutError):
        return JournalFailure(error, fatal=False)
    cause, text = cause_of(error), describe(error)
    match cause:
        case Cause.DISK_FULL:
            told = resource_exhausted("DISK_FULL", "the disk of the journal is full", detail=text)
        case Cause.DAMAGE:
            told = data_loss("JOURNAL_DAMAGED", "the journal is damaged", detail=text)
        case Cause.FSYNC:
            told = unavailable(FSYNC_REASON, "the disk did not confirm a write; this process ends", detail=text)
        case Cause.IO:
            told = unavailable("JOURNAL_IO", "the journal could not be written", detail=text)
        case Cause.FAULT:
            told = internal("JOURNAL_FAULT", "the journal failed by a fault of this program", detail=text)
    return JournalFailure(told, fatal=cause is Cause.FSYNC)


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error met while reading a file that nobody else writes speaks of its content.

    A missing table or column counts: the content of the schema is damaged then.
    """
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & _PRIMARY not in _INACCESSIBLE_CODES


def damaged(file: str, detail: str, *, last_good: int, acknowledged: int | None = None) -> TurnoutError:
    """Stored records are damaged or missing after position `last_good`."""
    metadata: dict[str, object] = {"file": file, "detail": detail, "last_good_position": last_good}
    if acknowledged is not None:
        metadata["acknowledged_position"] = acknowledged
    message = f"the journal is damaged: {detail} ({file}); the last good position is {last_good}"
    return data_loss("JOURNAL_DAMAGED", message, **metadata)


def unknown_format(what: str, found: object, supported: object) -> TurnoutError:
    """The journal was written by another release, or for another service. Nothing of it was changed.

    `found` and `supported` are numbers, or schemas such as "buffer/2": an owner and a number.
    """
    message = (
        f"the journal has {what} {found!r}, and this release reads {supported!r}: {_whose(found, supported)}; nothing "
        "was changed, and docs/operations.md says how to go on"
    )
    return failed_precondition("JOURNAL_FORMAT", message, field=what, value=found, supported=supported)


def refuse_other_format(what: str, head: bytes, magic: bytes) -> None:
    """Refuse a file whose first bytes are `magic`, a name with two digits at its end, with other digits."""
    number = head[-2:]
    if head[:-2] == magic[:-2] and number.isdigit() and number != magic[-2:]:
        raise unknown_format(what, int(number), int(magic[-2:]))


def _whose(found: object, supported: object) -> str:
    owner, _, number = str(found).rpartition("/")
    own, _, read = str(supported).rpartition("/")
    if owner != own:
        return "it is another service's"
    if not number.isdigit():
        return "no release writes such a one"
    return f"{'an older' if int(number) < int(read) else 'a newer'} release wrote it"


def closed() -> TurnoutError:
    """The journal was closed."""
    return unavailable("JOURNAL_CLOSED", "the journal is closed")


def reopened() -> TurnoutError:
    """A reader began before the journal failed and was opened again."""
    return aborted("JOURNAL_REOPENED", "the journal was opened again while it was read")


def not_failed(state: str) -> TurnoutError:
    """Only a failed journal is opened again."""
    return failed_precondition("JOURNAL_NOT_FAILED", f"the journal is {state}, not FAILED", field="state", value=state)
