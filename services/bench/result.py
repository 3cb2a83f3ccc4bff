"""One measured value beside its baseline.

Invariants: a result is one JSON object `{"name", "unit", "value", "baseline", "ratio"}`; the baseline is the same work
done by the bare tools that the services stand on; ratio = value / baseline, null if the baseline is 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """A measured value."""

    name: str
    unit: str
    value: float
    baseline: float

    @property
    def ratio(self) -> float | None:
        """Value over baseline."""
        return self.value / self.baseline if self.baseline else None

    def to_line(self) -> str:
        """Return the result as one line of JSON."""
        ratio = None if self.ratio is None else round(self.ratio, 4)
        return json.dumps(
            {
                "name": self.name,
                "unit": self.unit,
                "value": round(self.value, 6),
                "baseline": round(self.baseline, 6),
                "ratio": ratio,
            }
        )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A value that could not be measured here."""

    name: str
    reason: str

    def to_line(self) -> str:
        """Return it as one line of JSON, `{"name", "skipped"}`."""
        return json.dumps({"name": self.name, "skipped": self.reason})
