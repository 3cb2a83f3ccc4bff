"""The picture and the bars of a learning job."""

from __future__ import annotations

from pathlib import Path

from services.views.learning import draw_learning
from services.views.picture import Panel
from services.views.table import bars
from services.views.timeline import Mark, Row, Stretch, Timeline

LINE = Timeline((Row("hybrid-0", (Stretch(0, 60, "decoding"), Stretch(60, 90, "asleep"))),), (Mark(60, "reclaim"),), 90)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    """Also without a single reading of memory."""
    for memory in ([(0.0, 1 << 30), (60.0, 1 << 29)], []):
        path = tmp_path / f"{len(memory)}.png"
        draw_learning(path, title="seed 0", rewards=[0.1, 0.5], memory=memory, panel=Panel("2 lends", LINE))
        assert path.read_bytes().startswith(b"\x89PNG")


def test_bars_rise_with_their_values() -> None:
    """What lies outside is drawn at the edge."""
    assert bars([0.0, 0.5, 1.0]) == "▁▅█"
    assert bars([-1.0, 7.0]) == "▁█"
    assert bars([1.0, 2.0], most=2.0) == "▅█"
