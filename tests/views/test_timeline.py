"""Timelines and their picture."""

from __future__ import annotations

from pathlib import Path

from services.views.picture import Panel, draw
from services.views.timeline import Mark, Stretch, timeline
from tests.demo.jobs import event, small_job


def test_rows_are_standalone_then_hybrid_then_trainer() -> None:
    """A picture whose rows jump about between two jobs cannot be compared."""
    assert [row.label for row in timeline(small_job()).rows] == ["standalone-0", "hybrid-0", "trainer"]


def test_stretches_cover_the_job_without_gap_or_overlap() -> None:
    """A gap would read as a state of its own."""
    made = timeline(small_job())
    for row in made.rows:
        assert row.stretches[0].start == 0
        assert row.stretches[-1].end == made.end == 100
        for one, next_one in zip(row.stretches, row.stretches[1:], strict=False):
            assert one.end == next_one.start
            assert one.state != next_one.state


def test_states_are_those_of_the_events_and_moments_without_length_are_left_out() -> None:
    """A state that was replaced at once was never there."""
    job = [event(5, "trainer", state="a"), event(5, "trainer", state="b"), event(7, "job_ended")]
    assert timeline(job).rows[-1].stretches == (Stretch(5, 7, "b"),)


def test_switch_moments_are_marked() -> None:
    """The picture is about them."""
    marks = [Mark(1, "lend"), Mark(3, "reclaim"), Mark(60, "lend"), Mark(70, "reclaim")]
    assert list(timeline(small_job()).marks) == marks


def test_the_picture_is_a_png_of_two_panels(tmp_path: Path) -> None:
    """The one file that a newcomer looks at must come out, even of odd jobs."""
    path = tmp_path / "picture.png"
    odd = timeline([event(0, "trainer", state="never heard of"), event(1, "job_ended")])
    draw([Panel("off", timeline(small_job())), Panel("on", odd)], path, title="title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 200_000
