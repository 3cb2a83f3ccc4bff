"""How a learning job went, as a picture: reward per step, memory of an engine over time, and who did what when.

Invariant: memory and timeline share one time axis, that of the job's clock in minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from services.views.picture import Panel, legend_of, panel_on

_LINE = "#3b75af"
_MIB = 2**20


def draw_learning(
    path: Path, *, title: str, rewards: Sequence[float], memory: Sequence[tuple[float, int]], panel: Panel
) -> None:
    """Write the picture as a PNG. `memory` is (seconds, bytes), each from its moment on."""
    figure = Figure(figsize=(11.5, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    reward_axis, memory_axis, timeline_axis = figure.subplots(3, 1, height_ratios=[3, 2, 2])
    reward_axis.plot(range(1, len(rewards) + 1), rewards, color=_LINE, marker=".", linewidth=1.4)
    reward_axis.set_title("mean reward of each step", loc="left", fontsize=10)
    reward_axis.set_xlabel("step")
    reward_axis.set_ylim(0, 1.03)
    end = panel.timeline.end
    times = [at / 60 for at, _ in memory] + [end / 60]
    sizes = [size / _MIB for _, size in memory]
    memory_axis.step(times, [*sizes, sizes[-1]] if sizes else [0.0], where="post", color=_LINE, linewidth=1.1)
    memory_axis.set_ylim(bottom=0)
    memory_axis.set_title("memory of the hybrid engine's worker, MiB", loc="left", fontsize=10)
    panel_on(timeline_axis, panel)
    timeline_axis.set_xlabel("minutes of the job")
    for axis in (memory_axis, timeline_axis):
        axis.set_xlim(0, max(end, 1.0) / 60 * 1.01)
    handles = legend_of([panel])
    figure.legend(handles=handles, loc="outside lower center", ncols=max(len(handles), 1), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(path, dpi=110, format="png")
