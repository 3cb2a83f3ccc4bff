"""Engines that a supervisor starts anew on GPUs of the trainer: awake, as a fresh process is, though nobody asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.loop import house as houses
from tests.loop.house import Cell, House
from tests.loop.jobs import RUNS, Job
from tests.loop.model import Model
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb

NEVER_S = 3600.0


@asynccontextmanager
async def training(root: Path) -> AsyncIterator[tuple[Model, Job, Cell]]:
    """A trainer that has its GPUs and begins a step next, and the engine of one of them."""
    house = House(root, list(RUNS))
    await house.start()
    try:
        model = Model(house)
        await model.begin()
        job = model.jobs["a"]
        async with asyncio.timeout(60):
            while not (model.trains(job) and job.stage == "between"):
                # With groups in stock, nothing is lent at the end of the step.
                await model.groups.supply(job)
                await model.train(job, 1)
        yield model, job, house.room.cells["a-g1"]
    finally:
        await house.close()


async def comes_true(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that engines and services do by themselves."""
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110 - engines and services tell nobody
            await asyncio.sleep(0.01)


async def asleep(cell: Cell) -> bool:
    return not await cell.awake()


async def seen_awake(model: Model, job: Job) -> bool:
    """Whether the scheduler was told that an engine has memory on the trainer's GPUs."""
    run = (await model.asked(model.scheduler.GetRun(pb.GetRunRequest(run_id=job.run_id)))).run
    return bool(run.mode == events_pb2.MODE_RECLAIMING)


async def test_the_trainer_is_not_told_to_train_over_an_engine_that_was_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its death and its return fell between two probes, so that it counted as free: BeginStep asks the engines now."""
    monkeypatch.setattr(houses, "WATCH_S", NEVER_S)
    async with training(tmp_path) as (model, job, cell):
        cell.start()
        assert await cell.awake()
        # `train` fails if the trainer is told to train over it.
        await model.train(job, 1)
        assert (job.stage, await cell.awake()) == ("begun", False)
        await model.check()


@pytest.mark.parametrize("dies", [False, True])
async def test_an_engine_that_was_started_anew_within_a_step_is_put_to_sleep(tmp_path: Path, dies: bool) -> None:
    """The trainer calls nobody for minutes, while it has less memory than it was told."""
    async with training(tmp_path) as (model, job, cell):
        if dies:
            await cell.die()
        cell.start()
        await comes_true(lambda: asleep(cell))
        await model.train(job, 1)
        assert job.stage == "begun"
        await model.check()


async def test_it_is_put_to_sleep_by_the_next_controller_too(tmp_path: Path) -> None:
    """The next one meets an engine that it knows, so nothing tells it that nobody asked for its memory."""
    async with training(tmp_path) as (model, job, cell):
        engine = model.house.engines["a"]
        cell.start()
        cell.hang()
        await comes_true(lambda: seen_awake(model, job))
        await engine.kill()
        await engine.start()
        cell.heal()
        await comes_true(lambda: asleep(cell))
