"""Results of the simulator as a table and as a picture.

Invariants: a saving is against not switching with the same workload and seed, never against another seed; a workload
that was simulated without `off` has no savings, and none is invented.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from services.simulator.result import Result

_COLOURS = {"off": "#dde3ea", "fixed": "#e0a030", "verl": "#3b75af", "jit": "#2e8b57", "oracle": "#8c8c9a"}
_OTHER = "#d9534f"

Savings = Mapping[str, Mapping[str, Sequence[float]]]
"""Share of wall clock saved, by workload, policy and seed."""


def savings(results: Sequence[Result], policies: Sequence[str]) -> Savings:
    """What each of `policies` saves against `off`."""
    off = {(result.workload, result.seed): result.hours for result in results if result.policy == "off"}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        reference = off.get((result.workload, result.seed))
        if reference is not None and result.policy in policies and result.policy != "off":
            found[result.workload][result.policy].append(1 - result.hours / reference)
    return found


def simulation_table(results: Sequence[Result]) -> Table:
    """One row per workload and policy, means over seeds. `idle` is the trainer's."""
    table = Table(title="Simulated runs", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for heading in ("hours", "saved", "of oracle", "idle", "lends", "staleness"):
        table.add_column(heading, justify="right", no_wrap=True)
    saved = savings(results, [result.policy for result in results])
    rows: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        rows[result.workload, result.policy].append(result)
    before = ""
    for (workload, policy), runs in rows.items():
        gains = saved.get(workload, {}).get(policy)
        best = saved.get(workload, {}).get("oracle")
        # A share of next to nothing says nothing.
        share = f"{fmean(gains) / fmean(best):.0%}" if gains and best and fmean(best) > 0.005 else ""
        table.add_row(
            workload if workload != before else "",
            policy,
            f"{fmean(run.hours for run in runs):.2f}",
            f"{100 * fmean(gains):+.2f} %" if gains else "",
            share if policy != "oracle" else "",
            f"{fmean(run.trainer_idle_share for run in runs):.1%}",
            f"{fmean(run.lends for run in runs):.0f}",
            f"{fmean(run.mean_staleness for run in runs):.2f}",
        )
        before = workload
    return table


def band(saved: Savings) -> str:
    """One line per policy: what it saves with the first workload, and the range over all of them."""
    first = next(iter(saved.values()), {})
    return "\n".join(
        f"{policy} saves {fmean(gains):.1%}; between {min(all_):.1%} and {max(all_):.1%} under the other assumptions."
        for policy, gains in first.items()
        if (all_ := [fmean(found[policy]) for found in saved.values()])
    )


def simulation_picture(saved: Savings, path: Path) -> None:
    """Write the savings as bars, one group per workload, with a line from the least to the most of the seeds."""
    workloads = list(saved)
    policies = list(dict.fromkeys(policy for found in saved.values() for policy in found))
    height = 0.8 / max(len(policies), 1)
    figure = Figure(figsize=(9.0, 1.6 + 0.22 * max(len(workloads) * (len(policies) + 1), 4)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for place, policy in enumerate(policies):
        for row, workload in enumerate(workloads):
            gains = [100 * gain for gain in saved[workload].get(policy, ())]
            if gains:
                at = row - 0.4 + (place + 0.5) * height
                label = policy if row == 0 else None
                axis.barh(at, fmean(gains), height * 0.92, color=_COLOURS.get(policy, _OTHER), label=label)
                axis.plot([min(gains), max(gains)], [at, at], color="#111111", linewidth=0.9)
    axis.set_yticks(range(len(workloads)), workloads, fontsize=9)
    axis.set_ylim(len(workloads) - 0.4, -0.6)
    axis.axvline(0, color="#111111", linewidth=0.8)
    axis.set_xlabel("wall clock saved against not switching, %")
    axis.grid(axis="x", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    if policies and workloads:
        figure.legend(loc="outside lower center", ncols=len(policies), frameon=False, fontsize=9)
    figure.suptitle("What lending gains, simulated", fontsize=12, fontweight="bold")
    figure.savefig(path, dpi=110, format="png")
