"""Three runs, two of which want the same GPU, and what their trainers and workers were told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from turnout.buffer.v1 import buffer_pb2 as bpb
from turnout.scheduler.v1 import scheduler_pb2 as pb

RUNS = {"a": ("g0", "g1"), "b": ("g1", "g2"), "c": ("g3",)}
"""The GPUs of the hybrids of each run: a and b share one, so they cannot be open together."""

POLICIES = {"a": "verl", "b": "fixed", "c": "shadow:fixed"}
MINI, MINI_BATCHES = 2, 2
BATCH = MINI * MINI_BATCHES

PASSING = {
    "RECLAIM_FAILED",
    "LEND_FAILED",
    "ABORT_LEND_FAILED",
    "BUFFER_UNREACHABLE",
    "ENGINE_UNREACHABLE",
    "UNAVAILABLE",
    "DRAINING",
}
"""What a trainer may be refused with while something is broken: it repeats the call later, and nothing has changed."""


@dataclass
class Job:
    """One run: what its trainer and its worker were told.

    `alive`: there is a trainer. `open`: the scheduler was told to open it, and not to close it. `calls`: what the
    trainer of the present epoch was answered.
    """

    run_id: str
    epoch: int = 0
    alive: bool = False
    open: bool = False
    known: bool = False
    step: int = 0
    stage: str = "between"
    mini_batch: int = 0
    attempt: int = 0
    validated: int = 0
    lend: pb.Lend | None = None
    installed: bool = False
    abandons: bool = False
    update_id: str = ""
    updates: int = 0
    lends: dict[str, int] = field(default_factory=dict)
    """Lends that its trainers were given, with the epoch of each."""
    calls: list[tuple[str, Any, Any]] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    committed: list[str] = field(default_factory=list)
    saves: dict[str, tuple[int, list[str], list[str]]] = field(default_factory=dict)
    claimed: list[bpb.Claim] = field(default_factory=list)
    pending: bool = False
    """Whether the last call was refused or cut: the scheduler may have gone on with it by itself."""

    @property
    def gpus(self) -> list[tuple[str, str]]:
        """Node and UUID of the devices of its hybrids."""
        return [("n0", uuid) for uuid in RUNS[self.run_id]]

    @property
    def who(self) -> dict[str, Any]:
        """What its trainer's calls have in common."""
        return {"run_id": self.run_id, "epoch": self.epoch}


class Refused(Exception):
    """A call was refused for a reason that passes."""
