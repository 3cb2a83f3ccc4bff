"""Long work gives the loop away, and gets on even where the loop is never idle."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.buffer.storage.pauses import LONGEST_SLICE_S, SLICE_S, Pauses


class Loop:
    """Time that passes only as told; each pause ends `late`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.late = 0.0
        self.slept: list[float] = []
        module = "services.buffer.storage.pauses"
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(f"{module}.asyncio", SimpleNamespace(sleep=self.sleep))

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.late


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


async def _slice(loop: Loop, work: Pauses) -> float:
    """Work in steps of a tenth of a millisecond until there is a pause; returns for how long."""
    begun = loop.now
    count = len(loop.slept)
    while len(loop.slept) == count:
        loop.now += 0.0001
        before = loop.now
        await work.breathe()
    return before - begun


async def test_half_of_the_time_belongs_to_the_calls(loop: Loop) -> None:
    work = Pauses()
    slices = [await _slice(loop, work) for _ in range(3)]
    assert slices == pytest.approx([SLICE_S] * 3, abs=0.0002)
    assert loop.slept == pytest.approx(slices)


async def test_a_busy_loop_does_not_starve_a_snapshot(loop: Loop) -> None:
    """With turns of 100 ms between slices of 2 ms, an image of 100 000 groups took longer than the log to grow."""
    work = Pauses()
    for late, expected in (
        (0.1, SLICE_S),
        (0.1, LONGEST_SLICE_S),
        (0.02, LONGEST_SLICE_S),
        (0.0, 0.005),
        (0.0, SLICE_S),
    ):
        loop.late = late
        assert await _slice(loop, work) == pytest.approx(expected, abs=0.0002)
