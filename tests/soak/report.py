"""What a soak found, for a person and as JSON. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

STUCK_S: Final = 60.0
"""A wait or call that succeeds only this long after the service's return did not recover by itself."""

_SHOWN: Final = 40
"""Faults printed for a person; JSON has all."""


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a least-squares line; 0.0 for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    found: float = statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome; times in seconds."""

    seed: int
    seconds: float
    durability: str
    wall_s: float
    drain_s: float
    small_disk: bool
    faults: dict[str, int]
    service_lives: int
    clock_shifts: int
    """Of them, those whose monotonic clock was shifted."""

    started_in: list[float]
    recovered_in: list[float]
    """From each return of the service to the next success of each process that lived through it, sorted."""
    service_errors: dict[str, int]
    """What the service logged as an error, by message."""
    refused_starts: int
    ledgers: dict[str, dict[str, Any]]
    audited: bool
    batches: int
    committed: int
    """Groups, what restores made void included."""
    results_acknowledged: int
    restores: int
    resident_mib: list[float]
    """Memory of the service, one reading a second."""
    resident_slope_mib_per_min: float
    wrongs: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        return not self.all_wrongs

    @property
    def all_wrongs(self) -> list[str]:
        """What went wrong, recovery included."""
        stuck = [time for time in self.recovered_in if time > STUCK_S]
        return [*self.wrongs, *([f"{len(stuck)} processes were stuck for up to {stuck[-1]:.0f} s"] if stuck else [])]

    def to_json(self) -> dict[str, Any]:
        """Return everything but the single readings."""
        facts = asdict(self)
        readings, recoveries, starts = (facts.pop(name) for name in ("resident_mib", "recovered_in", "started_in"))
        facts["resident_mib"] = _spread(readings)
        facts["recovered_in_s"] = _spread(recoveries)
        facts["started_in_s"] = _spread(starts)
        facts["wrongs"] = self.all_wrongs
        facts["passed"] = self.passed
        return facts

    def to_text(self) -> str:
        """Return it for a person."""
        recovered, resident, started = map(_spread, (self.recovered_in, self.resident_mib, self.started_in))
        lines = [
            f"seed {self.seed}, {self.seconds:g} s of faults with durability {self.durability}, "
            f"drained in {self.drain_s:.0f} s, {self.wall_s:.0f} s in all",
            "faults: " + ", ".join(f"{count} x {name}" for name, count in sorted(self.faults.items())),
        ]
        if not self.small_disk:
            lines.append("the disk was not filled: mounting a small one needs root")
        for run_id, ledger in self.ledgers.items():
            reasons = ", ".join(f"{count} {reason}" for reason, count in ledger["evicted_by_reason"].items())
            lines.append(
                f"run {run_id}: {ledger['added']} added = {ledger['committed']} committed + {ledger['evicted']} evicted"
                f"{f' ({reasons})' if reasons else ''} + {ledger['present']} present"
            )
        lines += [
            f"{self.committed} groups committed in {self.batches} batches, {self.results_acknowledged} results "
            f"acknowledged, {self.restores} restores; audit {'balanced' if self.audited else 'FAILED'}",
            f"the service lived {self.service_lives} times, {self.clock_shifts} with a shifted clock; "
            f"start to ready: {_text(started)}; its return to the next "
            f"success of each process: {_text(recovered)}",
            f"memory of the service: median {resident.get('median', 0):.0f} MiB, "
            f"most {resident.get('max', 0):.0f} MiB, "
            f"slope {self.resident_slope_mib_per_min:+.2f} MiB/min",
        ]
        if self.service_errors:
            errors = ", ".join(f"{count} x {message!r}" for message, count in self.service_errors.items())
            lines.append(f"errors the service logged: {errors}")
        wrongs = self.all_wrongs
        lines.append("PASSED" if not wrongs else f"FAILED: {len(wrongs)} faults")
        lines += [f"  {wrong}" for wrong in wrongs[:_SHOWN]]
        return "\n".join(lines)


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p95": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))], 3),
        "max": round(ordered[-1], 3),
    }


def _text(spread: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} s" for name, value in spread.items()) or "none"
