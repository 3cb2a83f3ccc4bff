"""The report as one HTML file that needs nothing but itself.

Invariants: no reference leaves the file, so it opens offline and can be handed on; all text of the run is escaped; a
chart's x axis is the run's clock in every chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from services.views.picture import STATES
from services.views.report.account import RunAccount, StepAccount
from services.views.report.scale import Scale, nice_step, thinned
from services.views.report.shadow import shadow_sentence
from services.views.table import duration
from services.views.timeline import Row

T = TypeVar("T")

# Of a chart's width; a stretch below it would not be seen, and a run of days has thousands.
_LEAST_WIDTH = 1 / 6000
_POINTS = 1500
PARTS = (
    ("train", "training", "#2e8b57"),
    ("lent", "waiting while lent", "#7fb2e5"),
    ("wait", "waiting, GPUs in hand", "#d9534f"),
    ("sync", "weights to standalone", "#e0a030"),
    ("lend", "lending", "#b07cc6"),
    ("reclaim", "taking back", "#6b4c9a"),
)
"""Name, meaning and colour of what a step's time goes to."""


def render(account: RunAccount, run_id: str) -> str:
    """The page of a run."""
    environment = Environment(
        loader=PackageLoader("services.views.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["duration"] = duration
    scale = Scale(account.began_at, max(account.at, account.began_at + 1.0))
    return environment.get_template("page.html.j2").render(
        run_id=run_id,
        account=account,
        tiles=_tiles(account),
        ticks=[(scale.share(at), _clock(at)) for at in scale.ticks()],
        marks=[(scale.share(step.began_at), step.number) for step in _some(account.steps, 60)],
        lanes=[_lane(row, scale) for row in account.lanes.rows()],
        states=STATES,
        depth=_depth(account, scale),
        bars=_bars(account.steps),
        parts=PARTS,
        waits=_waits(account.steps),
        ages=_ages(account.steps),
        clock=_clock,
        decisions=account.decisions,
        shadow=shadow_sentence(account.decisions),
    )


def _tiles(account: RunAccount) -> list[tuple[str, str, str]]:
    """Name, value and explanation of each figure at the top."""
    lends = [lend for lend in account.lends if lend.served_s is not None]
    switch_s = sum(lend.switch_s for lend in account.lends)
    decoded = sum(lend.brought.decoded_tokens for lend in account.lends if lend.brought is not None)
    kept = sum(lend.brought.delivered_tokens for lend in account.lends if lend.brought is not None)
    nets = [lend.saved_s for lend in lends if lend.saved_s is not None]
    done = sum(step.ended_at is not None for step in account.steps)
    tiles = [
        ("run time", duration(account.seconds), "From the first event kept to the last, on the run's own clock."),
        ("steps", f"{done}", "Completed in what this report covers."),
        (
            "trainer waiting",
            f"{account.waited_s / account.seconds:.1%}" if account.seconds else "-",
            "Share of the run time in which the trainer waited for rollouts, its GPUs lent or not.",
        ),
        ("lends", f"{len(account.lends)}", "Completed, the one at the start included."),
        ("lent", duration(sum(lend.served_s or 0.0 for lend in lends)), "Time in which lent GPUs served."),
        ("switching", duration(switch_s), "Lends and reclaims, all together."),
        ("decoded on lent GPUs", _count(decoded), "Tokens, as the scheduler told of each lend after its step."),
        (
            "of these kept",
            f"{kept / decoded:.1%}" if decoded else "-",
            "Share that came to its request, which goes on with it after the reclaim.",
        ),
    ]
    if any(step.recomputed or step.blackout_s for step in account.steps):
        recomputed = sum(step.recomputed for step in account.steps)
        blackout_s = sum(step.blackout_s for step in account.steps)
        tiles += [
            ("computed again", _count(recomputed), "Tokens of requests that weight updates interrupted."),
            ("nobody decoding", duration(blackout_s), "Time in weight updates in which no replica served."),
        ]
    if nets:
        tiles.append(
            (
                "saved, at most",
                duration(max(sum(nets), 0.0)),
                "What the standalone replicas would have needed, less switching.",
            )
        )
    if account.mean_age is not None:
        tiles.append(("age when trained", f"{account.mean_age:.2f} steps", "Since a group was added; mean."))
    if account.prediction_error_s is not None:
        tiles.append(
            ("prediction off by", f"{account.prediction_error_s:.1f} s", "Mean size of predicted less realised wait.")
        )
    return tiles


def _lane(row: Row, scale: Scale) -> dict[str, object]:
    stretches = []
    end = 0.0
    for stretch in row.stretches:
        left, right = scale.share(stretch.start), scale.share(stretch.end)
        if right - left < _LEAST_WIDTH and left - end < _LEAST_WIDTH:
            continue
        end = right
        text = f"{row.label}: {STATES[stretch.state][1]}, {_clock(stretch.start)} to {_clock(stretch.end)} "
        stretches.append(
            {
                "x": left * 1000,
                "w": max(right - left, _LEAST_WIDTH) * 1000,
                "state": stretch.state,
                "title": f"{text}({duration(stretch.end - stretch.start)})",
            }
        )
    return {"label": row.label, "stretches": stretches}


def _depth(account: RunAccount, scale: Scale) -> dict[str, object]:
    """Both lines as SVG paths of steps, 1000 wide and 200 high."""
    top = max([value for _, value in (*account.depths, *account.thresholds)], default=1.0) * 1.08 or 1.0

    def path(points: Sequence[tuple[float, float]]) -> str:
        kept = thinned(points, _POINTS)
        if not kept:
            return ""
        parts = [f"M{1000 * scale.share(kept[0][0]):.2f},{200 * (1 - kept[0][1] / top):.1f}"]
        for (_, _), (at, value) in pairwise(kept):
            parts.append(f"H{1000 * scale.share(at):.2f}V{200 * (1 - value / top):.1f}")
        return "".join([*parts, "H1000"])

    line = path(account.depths)
    first = 1000 * scale.share(account.depths[0][0]) if account.depths else 0.0
    step = nice_step(top / 4)
    return {
        "area": f"{line}V200H{first:.2f}Z" if line else "",
        "line": line,
        "threshold": path(account.thresholds),
        "grid": [(200 * (1 - value * step / top), f"{value * step:g}") for value in range(int(top / step) + 1)],
    }


def parts_of(step: StepAccount) -> dict[str, float]:
    """Seconds of a step by the names of PARTS."""
    return {
        "train": step.train_s or 0.0,
        "lent": step.lent_s,
        "wait": step.wait_s,
        "sync": step.sync_s,
        "lend": step.lend_s,
        "reclaim": step.reclaim_s,
    }


def _bars(steps: Sequence[StepAccount]) -> dict[str, object]:
    """One stacked bar a step, 1000 wide all together and 200 high."""
    done = [step for step in steps if step.ended_at is not None]
    top = max((sum(parts_of(step).values()) for step in done), default=1.0) * 1.05 or 1.0
    width = 1000 / max(len(done), 1)
    bars = []
    for place, step in enumerate(done):
        parts, low = parts_of(step), 0.0
        rects = []
        for name, _, colour in PARTS:
            height = 200 * parts[name] / top
            rects.append({"y": 200 - low - height, "h": height, "colour": colour})
            low += height
        told = [f"{text} {parts[name]:.1f} s" for name, text, _ in PARTS if parts[name]]
        if step.recomputed:
            told.append(f"{step.recomputed} tokens computed again")
        if step.blackout_s:
            told.append(f"nobody decoding {step.blackout_s:.1f} s")
        listed = ", ".join(told)
        bars.append({"x": place * width, "w": width * 0.86, "rects": rects, "title": f"step {step.number}: {listed}"})
    grid = nice_step(top / 4)
    return {
        "bars": bars,
        "grid": [(200 * (1 - n * grid / top), f"{n * grid:g}") for n in range(int(top / grid) + 1)],
        "labels": [((place + 0.43) * width / 1000, step.number) for place, step in _some(list(enumerate(done)), 24)],
    }


def _waits(steps: Sequence[StepAccount]) -> list[dict[str, object]]:
    """Predicted and realised wait of the steps that have both, as points 1000 by 200."""
    both = [(s, s.predicted_wait_s) for s in steps if s.predicted_wait_s is not None and s.ended_at is not None]
    top = max((max(step.wait_s, predicted) for step, predicted in both), default=1.0) or 1.0
    return [
        {
            "x": 1000 * predicted / top,
            "y": 200 * (1 - step.wait_s / top),
            "top": top,
            "title": f"step {step.number}: predicted {predicted:.1f} s, waited {step.wait_s:.1f} s",
        }
        for step, predicted in both
    ]


def _ages(steps: Sequence[StepAccount]) -> list[dict[str, object]]:
    """Mean and greatest age of the groups that each step trained on, as bars 1000 by 200."""
    done = [(step, step.mean_age) for step in steps if step.mean_age is not None]
    top = max((max(step.ages) for step, _ in done), default=1) or 1
    width = 1000 / max(len(done), 1)
    return [
        {
            "x": place * width,
            "w": width * 0.86,
            "mean": 200 * mean / top,
            "most": 200 * max(step.ages) / top,
            "top": top,
            "title": f"step {step.number}: mean {mean:.2f}, at most {max(step.ages)}, {len(step.ages)} groups",
        }
        for place, (step, mean) in enumerate(done)
    ]


def _some(things: Sequence[T], most: int) -> Sequence[T]:
    """Every n-th, so that at most so many are left."""
    return things[:: max(-(-len(things) // most), 1)]


def _clock(at: float) -> str:
    """A moment of the run's clock: `1:02:05`, or `2:05`."""
    whole = round(at)
    hours, minutes, seconds = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _count(tokens: int) -> str:
    for size, word in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.1f} {word}"
    return str(tokens)
