"""What an operator chooses about a journal.

Invariants: a level of durability names the accident that an answered call survives, and nothing weaker is ever called
durable; sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20


class Durability(StrEnum):
    """Which accident an answered call survives."""

    FSYNC = "fsync"
    """Power loss, a crash of the kernel, kill -9: the disk confirmed the bytes before the answer left."""

    OS = "os"
    """kill -9 and crashes of the process: the kernel has the bytes before the answer leaves. Power loss or a crash of
    the kernel may cost the newest records, at most those since the last WAL checkpoint; never older ones, and never the
    soundness of the file. The loss is found and reported when the journal is opened again."""

    NONE = "none"
    """Nothing: state is kept in memory alone and there is no file."""


DURABILITY_HELP: Final = (
    "what an answered call survives: fsync = power loss (the disk confirms every answer); os = the death of this "
    "process, but power loss may cost the newest answers; none = nothing is written, a restart begins empty"
)
"""The help text of a service's `--durability`."""


def durability_of(asked: Durability | None, data_dir: Path | None) -> Durability:
    """The durability that holds: what was asked for, else `os` with a data directory and `none` without.

    Raises ValueError if something is to survive and there is no directory.
    """
    if data_dir is None and asked not in (None, Durability.NONE):
        raise ValueError(f"durability: {asked} needs a data_dir")
    if asked is not None:
        return asked
    return Durability.NONE if data_dir is None else Durability.OS


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOptions:
    """How a journal is kept. Raises ValueError for a negative or zero size (the ballast may be 0 = none)."""

    durability: Durability = Durability.OS

    ballast_bytes: int = 16 * MIB
    """Space held in reserve and given back when the disk is full. 16 MiB is room for seconds of commits, and for the
    pages that deletes touch."""

    checkpoint_bytes: int = 16 * MIB
    """Length of the WAL at which it is copied into the database. Longer makes rarer pauses, a slower start, and in
    durability `os` a larger possible loss."""

    compact_bytes: int = 32 * MIB
    """Log at which a snapshot becomes due, unless half the last snapshot is more: each byte is then rewritten about
    twice at most. A restart reads a snapshot many times as fast as it replays the log."""

    def __post_init__(self) -> None:
        if self.ballast_bytes < 0:
            raise ValueError(f"ballast_bytes must not be negative, it is {self.ballast_bytes}")
        for name in ("checkpoint_bytes", "compact_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above zero, it is {getattr(self, name)}")
