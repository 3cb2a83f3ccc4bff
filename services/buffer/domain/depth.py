"""Depth: how many groups could be sampled at a step, and what else a trainer asks about.

Invariant: these are values; `GroupIndex` computes them from counts, never by walking groups.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Groups of a partition by state; finished and failed ones are those not sampled."""

    pending: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    sampled: int = 0

    @property
    def present(self) -> int:
        """All of them."""
        return self.pending + self.running + self.finished + self.failed + self.sampled

    @property
    def in_flight(self) -> int:
        """Those that can still become sampleable by finishing."""
        return self.pending + self.running


@dataclass(frozen=True, slots=True)
class Hold:
    """A started group in flight is so old that sampling waits for it (WAIT)."""

    group_id: str
    span: int


@dataclass(frozen=True, slots=True)
class Depth:
    """A reading for one step. `oldest_running_for` in domain seconds."""

    step: int
    sampleable: int
    counts: Counts
    hold: Hold | None
    unpaid_credits: int
    supply_ended: bool
    intake_paused: bool
    oldest_running_group_id: str
    oldest_running_for: float
