"""The demo's figures in words: the table of a seed, and the sentence under all of them."""

from __future__ import annotations

from rich.table import Table

from services.demo.comparison import Comparison
from services.demo.job import Job
from services.views.table import Line, comparison_table, duration, relative


def demo_table(comparison: Comparison, job: Job) -> Table:
    """Return the table of one seed."""
    off, on = comparison.off, comparison.on
    points = 100 * (on.trainer_idle_share - off.trainer_idle_share)
    lines = [
        Line(
            "wall clock of the job",
            duration(off.wall_clock_s),
            duration(on.wall_clock_s),
            relative(off.wall_clock_s, on.wall_clock_s),
        ),
        Line(
            "tokens/s",
            f"{off.tokens_per_s:,.0f}",
            f"{on.tokens_per_s:,.0f}",
            relative(off.tokens_per_s, on.tokens_per_s),
        ),
        Line(
            "trainer idle",
            f"{100 * off.trainer_idle_share:.1f} %",
            f"{100 * on.trainer_idle_share:.1f} %",
            f"{points:+.1f} points",
        ),
        Line("steps", str(off.steps), str(on.steps)),
        Line("lends", str(off.lends), str(on.lends)),
        Line("reclaims", str(off.reclaims), str(on.reclaims)),
        Line("mean staleness", f"{off.mean_staleness:.3f}", f"{on.mean_staleness:.3f}"),
        Line(
            "lost or duplicated groups",
            str(off.lost_groups + off.duplicated_groups),
            str(on.lost_groups + on.duplicated_groups),
        ),
    ]
    title = f"seed {comparison.seed}: {job.steps} steps of {job.batch_size} groups x {job.group_size}"
    return comparison_table(title, f"on, {job.policy}", lines)


def summary(comparisons: list[Comparison]) -> str:
    """Return what switching gained, over all seeds."""
    gains = [100 * comparison.gain for comparison in comparisons]
    mean = sum(gains) / len(gains)
    took = f"{abs(mean):.1f} % {'less' if mean >= 0 else 'more'} wall clock"
    real = sum(comparison.real_seconds for comparison in comparisons)
    if len(gains) == 1:
        return f"switching took {took}; both jobs took {duration(real)} here"
    return (
        f"switching took {took} on average over {len(gains)} seeds ({min(gains):.1f} % to {max(gains):.1f} % less); "
        f"all jobs took {duration(real)} here"
    )
