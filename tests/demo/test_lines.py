"""What the demo says below its table."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from services.demo.comparison import Comparison, compare
from services.demo.figures import figures
from services.demo.job import Job
from services.demo.lines import demo_table, summary
from tests.demo.jobs import small_job, trained


def comparison(seed: int, wall_clock_s: float) -> Comparison:
    """Return a comparison in which switching took so long, against 100 s."""
    off = figures(small_job())
    return Comparison(seed, off, replace(off, wall_clock_s=wall_clock_s), (), 3.0)


def test_the_summary_says_less_or_more() -> None:
    """A loss that reads like a gain would be worse than no summary."""
    assert summary([comparison(0, 88.0)]) == "switching took 12.0 % less wall clock; both jobs took 3.0 s here"
    assert "took 5.0 % more wall clock" in summary([comparison(0, 105.0)])
    assert "10.0 % less wall clock on average over 2 seeds (8.0 % to 12.0 % less)" in summary(
        [comparison(0, 88.0), comparison(1, 92.0)]
    )


def test_the_table_holds_every_figure() -> None:
    """What is not in the table is not seen."""
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(demo_table(comparison(0, 88.0), Job()))
    console.file.close()
    text = console.export_text()
    for part in ("wall clock", "-12.0 %", "tokens/s", "30.0 %", "lends", "reclaims", "0.500", "lost or duplicated"):
        assert part in text


def test_two_jobs_that_delivered_the_same_have_no_faults() -> None:
    """The rule by which the demo judges itself."""
    compared = compare(0, small_job(), small_job())
    assert compared.faults == ()
    assert compared.real_seconds == 6.0
    assert set(compared.to_dict()) == {"seed", "off", "on"}


def test_a_difference_between_the_two_jobs_is_a_fault_that_names_a_group() -> None:
    """A lend that damages what it interrupts must not pass as a gain."""
    damaged = [e for e in small_job() if not (e.name == "group_trained" and e["group_id"] == "b/0")]
    damaged.append(trained(70, "b/0", step=2, tokens=[300, 400], staleness=[1, 1], digest="ff"))
    assert compare(0, small_job(), damaged).faults == ("seed 0: 1 groups differ between the two jobs, b/0 among them",)


def test_a_lost_group_is_a_fault_in_both_views() -> None:
    """It is missing from the job, and from what both jobs delivered."""
    lossy = [e for e in small_job() if not (e.name == "group_trained" and e["group_id"] == "b/0")]
    faults = compare(3, lossy, small_job()).faults
    assert "seed 3, switching off: 1 groups were lost" in faults
    assert any("delivered with switching on alone" in fault for fault in faults)


def test_a_repeated_group_is_a_fault() -> None:
    """Trained on twice."""
    again = trained(90, "a/0", step=2, tokens=[100, 200], staleness=[1, 1], digest="0a")
    twice = sorted([*small_job(), again], key=lambda e: e.at)
    assert compare(0, twice, small_job()).faults[0].endswith("1 groups were trained on more than once")
