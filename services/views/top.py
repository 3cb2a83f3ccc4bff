"""The frame that `turnout top` shows of a run.

Invariants: a frame depends on the state alone; text from the network is shown as it is and never read as markup.
"""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.views.run_state import ReplicaState, RunState
from services.views.table import duration

_MODE_STYLE: Final = {
    "TRAINER": "bold green",
    "ROLLOUT": "bold blue",
    "LENDING": "bold yellow",
    "RECLAIMING": "bold yellow",
}
_MODE_MEANING: Final = {
    "TRAINER": "the trainer has its GPUs",
    "ROLLOUT": "the trainer's GPUs generate",
    "LENDING": "on their way to generation",
    "RECLAIMING": "on their way back",
}
_NOTE_STYLE: Final = {"decision": "", "move": "cyan", "trouble": "bold red"}
_ROUTE_STYLE: Final = {"serving": "blue", "held": "yellow", "out": "dim"}
_BAR_CELLS: Final = 40


def frame(run_id: str, state: RunState) -> RenderableType:
    """Return one frame."""
    return Group(_head(run_id, state), _depth(state), _replicas(state), _notes(state))


def _head(run_id: str, state: RunState) -> RenderableType:
    line = Text()
    line.append(run_id, style="bold")
    line.append(f"   step {state.step}   ")
    line.append(state.mode, style=_MODE_STYLE.get(state.mode, ""))
    if state.mode in _MODE_MEANING:
        line.append(f" ({_MODE_MEANING[state.mode]})")
    line.append(f"\npolicy {state.policy or 'not asked yet'}   epoch {state.epoch}   at {duration(state.at)}")
    line.append(f"   lends {state.lends}   reclaims {state.reclaims}   waited {duration(state.waited_s)}")
    if state.starving_since is not None:
        line.append(f"\nthe trainer waits since {duration(state.at - state.starving_since)}", style="red")
    if state.closed:
        line.append("\nclosed", style="dim")
    return Panel(line, title="turnout top", title_align="left")


def _depth(state: RunState) -> RenderableType:
    threshold = state.threshold
    full = max(state.sampleable, threshold or 0, 1)
    filled = round(_BAR_CELLS * state.sampleable / full)
    reached = threshold is not None and state.sampleable >= threshold
    bar = Text("groups  ")
    bar.append("█" * filled, style="green" if reached else "yellow")
    bar.append("·" * (_BAR_CELLS - filled), style="dim")
    bar.append(f"  {state.sampleable} sampleable")
    if threshold is not None:
        bar.append(f" of threshold {threshold}")
    bar.append(f", {state.in_flight} in flight")
    if state.unpaid_credits:
        bar.append(f", {state.unpaid_credits} to be refilled")
    return bar


def _replicas(state: RunState) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for heading in ("replica", "role", "route"):
        table.add_column(heading)
    for heading in ("running", "tokens/s", "tokens"):
        table.add_column(heading, justify="right")

    def place(replica: ReplicaState) -> tuple[bool, str]:
        return replica.hybrid, replica.replica_id

    for replica in sorted(state.replicas.values(), key=place):
        table.add_row(
            Text(replica.replica_id),
            "hybrid" if replica.hybrid else "standalone",
            Text(replica.route, style=_ROUTE_STYLE.get(replica.route, "")),
            str(replica.running),
            f"{replica.tokens_per_s:,.0f}",
            f"{replica.decoded_tokens:,}",
        )
    if not state.replicas:
        return Text("no reading of the replicas yet", style="dim")
    return table


def _notes(state: RunState) -> RenderableType:
    lines = Text()
    for note in state.notes:
        lines.append(f"{duration(note.at):>12}  ", style="dim")
        lines.append(f"{note.text}\n", style=_NOTE_STYLE.get(note.kind, ""))
    if not state.notes:
        lines.append("nothing decided yet", style="dim")
    lines.rstrip()
    return Panel(lines, title="decisions and moves", title_align="left")
