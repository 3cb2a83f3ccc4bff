"""Figures of two jobs beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

_BARS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of both jobs, ready to print."""

    name: str
    off: str
    on: str
    change: str = ""


def comparison_table(title: str, on_heading: str, lines: Iterable[Line]) -> Table:
    """Return the table."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for heading in ("switching off", on_heading, "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line.name, line.off, line.on, line.change)
    return table


def duration(seconds: float) -> str:
    """Return a length of time for people: `38 min 05 s`, `1 h 02 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def bars(values: Sequence[float], *, most: float = 1.0) -> str:
    """Return a row of small bars, one for each value from 0 to `most`."""
    return "".join(_BARS[min(max(int(value / most * len(_BARS)), 0), len(_BARS) - 1)] for value in values)


def relative(off: float, on: float) -> str:
    """Return how much `on` differs from `off`: `-11.8 %`."""
    return f"{100 * (on / off - 1):+.1f} %" if off else ""
