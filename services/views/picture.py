"""The timeline of the demo as a picture: the job without switching above the same job with it.

Invariants: both halves share one time axis, so the shorter one is seen to be shorter; a state has the same colour
everywhere, and every colour that is used is in the legend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from services.views.timeline import Timeline

STATES: Final = {
    "decoding": ("#3b75af", "decoding"),
    "training": ("#2e8b57", "training"),
    "updating": ("#e0a030", "weights move"),
    "idle": ("#dde3ea", "idle"),
    "waiting": ("#d9534f", "waiting for rollouts"),
    "asleep": ("#8c8c9a", "asleep, GPUs with the trainer"),
}
"""Colour and meaning of each state. Red is the time that Turnout is there to shorten."""

MARKS: Final[dict[str, tuple[str, Literal["-", ":"], str]]] = {
    "lend": ("#111111", "-", "lent"),
    "reclaim": ("#111111", ":", "taken back"),
}

_UNKNOWN: Final = ("#ffffff", "unknown")
_ROW_HEIGHT: Final = 0.78


@dataclass(frozen=True, slots=True)
class Panel:
    """One half of the picture."""

    title: str
    timeline: Timeline


def draw(panels: Sequence[Panel], path: Path, *, title: str) -> None:
    """Write the panels, one above the other, as a PNG; times are shown in minutes."""
    rows = sum(len(panel.timeline.rows) for panel in panels)
    figure = Figure(figsize=(11.5, 1.6 + 0.30 * rows + 0.45 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [max(len(panel.timeline.rows), 1) for panel in panels]
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max((panel.timeline.end for panel in panels), default=0.0)
    for axis, panel in zip(axes, panels, strict=True):
        panel_on(axis, panel)
        axis.set_xlim(0, max(longest, 1.0) / 60 * 1.01)
    axes[-1].set_xlabel("minutes of the job")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    handles = legend_of(panels)
    figure.legend(handles=handles, loc="outside lower center", ncols=max(len(handles), 1), frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, format="png")


def legend_of(panels: Sequence[Panel]) -> list[Any]:
    """Return a handle for every colour and line in the panels."""
    used = {stretch.state for panel in panels for row in panel.timeline.rows for stretch in row.stretches}
    handles: list[Any] = [
        Patch(facecolor=colour, label=text) for state, (colour, text) in STATES.items() if state in used
    ]
    marked = {mark.kind for panel in panels for mark in panel.timeline.marks}
    handles += [
        Line2D([], [], color=colour, linestyle=style, linewidth=1.2, label=text)
        for kind, (colour, style, text) in MARKS.items()
        if kind in marked
    ]
    return handles


def panel_on(axis: Any, panel: Panel) -> None:
    """Draw a panel; times in minutes."""
    rows = panel.timeline.rows
    for place, row in enumerate(rows):
        for state in {stretch.state for stretch in row.stretches}:
            spans = [(s.start / 60, (s.end - s.start) / 60) for s in row.stretches if s.state == state]
            colour, _ = STATES.get(state, _UNKNOWN)
            axis.broken_barh(spans, (place - _ROW_HEIGHT / 2, _ROW_HEIGHT), facecolors=colour, linewidth=0)
    for mark in panel.timeline.marks:
        colour, style, _ = MARKS[mark.kind]
        axis.axvline(mark.at / 60, color=colour, linestyle=style, linewidth=1.1)
    axis.axvline(panel.timeline.end / 60, color="#111111", linewidth=0.6, alpha=0.5)
    axis.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_title(panel.title, loc="left", fontsize=10)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
