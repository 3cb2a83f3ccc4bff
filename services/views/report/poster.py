"""The report as one picture: the timeline, the depth against the threshold, and each step's time.

Invariant: the colours are those of the page and of the demo's picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from services.views.picture import STATES
from services.views.report.account import RunAccount
from services.views.report.page import PARTS, parts_of
from services.views.report.scale import thinned
from services.views.table import duration

_HOUR_S = 2 * 3600.0


def draw(account: RunAccount, run_id: str, path: Path) -> None:
    """Write the picture as a PNG. Raises OSError."""
    rows = account.lanes.rows()
    unit, unit_s = ("hours", 3600.0) if account.seconds > _HOUR_S else ("minutes", 60.0)
    figure = Figure(figsize=(12, 5.2 + 0.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    lanes, depth, steps = figure.subplots(3, 1, height_ratios=[max(len(rows), 1) * 0.3, 2.0, 2.0])
    for place, row in enumerate(rows):
        for state, (colour, _) in STATES.items():
            spans = [(s.start / unit_s, (s.end - s.start) / unit_s) for s in row.stretches if s.state == state]
            lanes.broken_barh(spans, (place - 0.39, 0.78), facecolors=colour, linewidth=0)
    lanes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    lanes.set_ylim(len(rows) - 0.4, -0.6)
    used = {stretch.state for row in rows for stretch in row.stretches}
    _legend(lanes, [(colour, text) for state, (colour, text) in STATES.items() if state in used])

    for points, colour, style in ((account.depths, "#3b75af", "-"), (account.thresholds, "#d9534f", "--")):
        kept = thinned(points, 3000)
        times, values = [at / unit_s for at, _ in kept], [value for _, value in kept]
        depth.step(times, values, where="post", color=colour, linestyle=style, linewidth=1.2)
    depth.set_xlabel(f"{unit} of the run")
    depth.set_ylim(bottom=0)
    _legend(depth, [("#3b75af", "sampleable groups"), ("#d9534f", "threshold")])
    for axis in (lanes, depth):
        axis.set_xlim(account.began_at / unit_s, max(account.at, account.began_at + 1) / unit_s)

    done = [step for step in account.steps if step.ended_at is not None]
    low = [0.0] * len(done)
    for name, _, colour in PARTS:
        heights = [parts_of(step)[name] for step in done]
        steps.bar([step.number for step in done], heights, bottom=low, color=colour, width=0.86)
        low = [a + b for a, b in zip(low, heights, strict=True)]
    steps.set_xlabel("step")
    steps.set_ylabel("seconds")
    _legend(steps, [(colour, text) for _, text, colour in PARTS])
    for axis in (lanes, depth, steps):
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    waiting = f", trainer waiting {account.waited_s / account.seconds:.1%}" if account.seconds else ""
    figure.suptitle(f"{run_id}: {duration(account.seconds)}{waiting}", fontsize=12, fontweight="bold")
    figure.savefig(path, dpi=110, format="png")


def _legend(axis: Any, entries: list[tuple[str, str]]) -> None:
    handles = [Patch(facecolor=colour, label=text) for colour, text in entries]
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, fontsize=8, frameon=False)
