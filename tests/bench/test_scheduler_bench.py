"""The scheduler bench runs, and its figures are those that are asked for."""

from __future__ import annotations

import pytest

from services.bench.scheduler import FIGURES, measure
from services.bench.scheduler_policy import Scene
from services.scheduler.policies.types import Action, Point
from services.scheduler.readings import requests_of
from services.scheduler.reports import Reports


@pytest.mark.timeout(120)
async def test_all_figures_are_measured_beside_their_baselines() -> None:
    """A bench that leaves a figure out, or measures nothing, says that all is well."""
    results = [result async for result in measure(quick=True)]
    assert tuple(result.name for result in results) == FIGURES
    assert all(result.value > 0 and result.baseline > 0 for result in results)


def test_the_decisions_that_are_timed_rest_on_a_forecast() -> None:
    """A policy that has not learned enough yet answers at once, and its time means nothing."""
    scene = Scene("jit", 1024)
    scene.tell(requests_of(scene.reading(), "train", scene.turns, Reports()))
    ended = scene.run.decide(Point.STEP_END, scene.step, scene.moment)
    assert ended.action is Action.LEND
    assert ended.placement is not None
    assert len(ended.placement.hybrid) + len(ended.placement.standalone) == 1024
    scene.begin_lent_step()
    waiting = scene.run.decide(Point.WAITING, scene.step, scene.moment)
    assert waiting.numbers["reclaim_in_seconds"] >= 0
