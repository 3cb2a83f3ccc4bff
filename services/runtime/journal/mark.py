"""How far records were acknowledged, kept outside the database.

Why: SQLite takes the sound beginning of a damaged WAL for the whole and says nothing, and a database without its WAL,
or an older copy of both, looks complete. The mark is the evidence against which a journal is held when it is opened.

Invariants: the mark is raised after a commit and before its answers leave, so it never claims more than was durable at
that moment; it is one write into one sector, so it is old or new and never torn; it survives the death of the process
without a sync of its own, and after power loss it may be low, never high. In durability `os` the *records* may be
behind it after power loss, which is why it also names the boot of the machine.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import google_crc32c

from services.runtime.journal.failures import damaged, refuse_other_format
from services.runtime.journal.options import Durability

_FIELDS: Final = struct.Struct(">8sB16s16sQ")
_CRC: Final = struct.Struct(">I")
_MAGIC: Final = b"TNMARK01"
_LEVELS: Final = (Durability.FSYNC, Durability.OS)


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What a mark says: how far, of which journal, under which durability, in which boot of the machine."""

    journal_id: bytes
    durability: Durability
    boot_id: bytes
    position: int


def read_mark(path: Path) -> Acknowledged | None:
    """Return what the mark says, None if there is none.

    Raises DATA_LOSS if it is damaged, FAILED_PRECONDITION / JOURNAL_FORMAT if it has another format.

    An empty file is none: its creation was cut short, before there was a database.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if not data:
        return None
    # Before all else: what a mark of another format holds is unknown.
    refuse_other_format("mark format", data[: len(_MAGIC)], _MAGIC)
    fields, crc = data[: _FIELDS.size], data[_FIELDS.size :]
    if len(crc) != _CRC.size or _CRC.unpack(crc)[0] != google_crc32c.value(fields):
        raise damaged(path.name, "the mark of what was acknowledged has a wrong checksum", last_good=0)
    magic, level, journal_id, boot_id, position = _FIELDS.unpack(fields)
    if magic != _MAGIC or level >= len(_LEVELS):
        raise damaged(path.name, "the mark of what was acknowledged has an unknown form", last_good=0)
    return Acknowledged(journal_id, _LEVELS[level], boot_id, position)


class Mark:
    """The mark of an open journal."""

    def __init__(self, path: Path, said: Acknowledged) -> None:
        """Write the mark and wait until the disk has it."""
        self._head = (_MAGIC, _LEVELS.index(said.durability), said.journal_id, said.boot_id)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self.write(said.position)
            os.fsync(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, position: int) -> None:
        """Say that everything up to `position` was acknowledged."""
        fields = _FIELDS.pack(*self._head, position)
        os.pwrite(self._descriptor, fields + _CRC.pack(google_crc32c.value(fields)), 0)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)
