"""One measured value beside its baseline.

Invariants: a result is one JSON object `{"name", "unit", "value", "baseline", "ratio"}`; the baseline is the same work
done by the bare tools that the services stand on; ratio = value / baseline, null if the baseline is 0. One that has to
reach something has `{"limit", "met"}` too; a limit is in the unit of the value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """A measured value; `limit` is the most that it may be, with `at_least` the least."""

    name: str
    unit: str
    value: float
    baseline: float
    limit: float | None = None
    at_least: bool = False

    @property
    def ratio(self) -> float | None:
        """Value over baseline."""
        return self.value / self.baseline if self.baseline else None

    @property
    def met(self) -> bool:
        """Whether the value is within its limit, if it has one."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_line(self) -> str:
        """Return the result as one line of JSON."""
        told: dict[str, object] = {
            "name": self.name,
            "unit": self.unit,
            "value": round(self.value, 6),
            "baseline": round(self.baseline, 6),
            "ratio": None if self.ratio is None else round(self.ratio, 4),
        }
        if self.limit is not None:
            told |= {"limit": round(self.limit, 6), "met": self.met}
        return json.dumps(told)

    def to_text(self) -> str:
        """Return the result as a line for a person."""
        text = f"{self.name}: {self.value:.4g} {self.unit} (bare: {self.baseline:.4g})"
        if self.limit is not None:
            text += (
                f", {'at least' if self.at_least else 'at most'} {self.limit:.4g}: {'met' if self.met else 'MISSED'}"
            )
        return text


@dataclass(frozen=True, slots=True)
class Skipped:
    """A value that could not be measured here."""

    name: str
    reason: str

    def to_line(self) -> str:
        """Return it as one line of JSON, `{"name", "skipped"}`."""
        return json.dumps({"name": self.name, "skipped": self.reason})
