"""What a soak is told: value objects, all times in seconds, all sizes in bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.soak.content import MIB

RUNS: Final = ("drop", "wait")
"""The two runs, by what they do with groups that are too old. Each has one trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Mean seconds between two faults of a kind; 0 means never."""

    kill_worker: float = 5.0
    kill_trainer: float = 20.0
    kill_service: float = 25.0
    stop_service: float = 90.0
    """SIGTERM instead of kill -9."""
    fill_disk: float = 60.0
    tear: float = 1.0
    """Any fault of one connection."""

    def faster(self, factor: float) -> Rates:
        """Return the same with everything more often."""
        return Rates(**{name: getattr(self, name) / factor for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """Everything that shapes a soak."""

    directory: Path
    """Where books, logs and the data directory lie."""
    seconds: float = 600.0
    """How long faults happen; draining and comparing come after."""
    seed: int = field(default_factory=lambda: random.SystemRandom().randrange(2**32))
    durability: str = "fsync"
    workers: int = 8
    """Worker processes; the last two, if there are four or more, run the client's RolloutWorker."""
    disk_bytes: int = 1024 * MIB
    """Size of the disk of the buffer, where one can be mounted."""
    largest: int = 3 * MIB
    """Largest payload of a trajectory."""
    rates: Rates = field(default_factory=Rates)
    drain_within: float = 180.0
    """After the last fault everything has to be done within this."""
