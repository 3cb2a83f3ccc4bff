"""A seed's job without and with switching, side by side.

Invariants: both jobs must have delivered the same trajectories, byte for byte; anything lost, repeated or different is
a fault that is named and never averaged away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.demo.events import Event
from services.demo.figures import Delivered, Figures, delivered, figures, gain


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of one seed."""

    seed: int
    off: Figures
    on: Figures
    faults: tuple[str, ...]
    """One sentence each; empty if all is well."""

    real_seconds: float
    """What both jobs took on this machine."""

    @property
    def gain(self) -> float:
        """Share of the wall clock that switching saved."""
        return gain(self.off, self.on)

    def to_dict(self) -> dict[str, Any]:
        """Return it as `--json` has it."""
        return {"seed": self.seed, "off": self.off.to_dict(), "on": self.on.to_dict()}


def compare(seed: int, off: list[Event], on: list[Event]) -> Comparison:
    """Compare two jobs by their events; raises IncompleteJob."""
    made = {"off": figures(off), "on": figures(on)}
    faults = [fault for mode, of in made.items() for fault in _losses(f"seed {seed}, switching {mode}", of)]
    faults += _differences(seed, delivered(off), delivered(on))
    real = sum(event["real_seconds"] for event in (*off, *on) if event.name == "job_ended")
    return Comparison(seed, made["off"], made["on"], tuple(faults), real)


def _losses(which: str, of: Figures) -> Iterable[str]:
    if of.lost_groups:
        yield f"{which}: {of.lost_groups} groups were lost"
    if of.duplicated_groups:
        yield f"{which}: {of.duplicated_groups} groups were trained on more than once"


def _differences(seed: int, off: dict[str, Delivered], on: dict[str, Delivered]) -> Iterable[str]:
    for name, only in (("off", set(off) - set(on)), ("on", set(on) - set(off))):
        if only:
            yield f"seed {seed}: {len(only)} groups were delivered with switching {name} alone, {min(only)} among them"
    different = [group_id for group_id in off.keys() & on.keys() if off[group_id] != on[group_id]]
    if different:
        yield f"seed {seed}: {len(different)} groups differ between the two jobs, {min(different)} among them"
