"""Commands and orders that arrive when whoever sent them is long dead: they must not take the trainer's GPUs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.loop.house import Gate, House
from tests.loop.jobs import RUNS
from tests.loop.model import Model
from turnout.engine.v1 import engine_pb2 as epb


async def test_a_wake_that_an_engine_has_still_before_it_keeps_the_trainer_out(tmp_path: Path) -> None:
    """The next controller saw memory asleep and called it free; then the engine came to the wake of the one before."""
    house = House(tmp_path, list(RUNS))
    await house.start()
    try:
        model = Model(house)
        await model.begin()
        job, cell = model.jobs["a"], house.room.cells["a-g1"]
        while job.mini_batch < 2:
            await model.train(job, 1)
        assert model.trains(job)
        cell.hang()
        while job.stage != "between":
            await model.train(job, 1)
        await house.engines["a"].kill()
        await house.engines["a"].start()
        assert not await cell.awake()
        for _ in range(2):
            await model.train(job, 1)
            assert not model.trains(job), "its engine is about to wake"
        cell.heal()
        async with asyncio.timeout(20):
            while not model.trains(job):
                await model.train(job, 1)
        await model.check()
    finally:
        await house.close()


async def test_a_sleep_that_an_engine_has_still_before_it_meets_no_weights(tmp_path: Path) -> None:
    """The next controller saw memory awake and began an update; then the engine came to the sleep of the one before."""
    house = House(tmp_path, list(RUNS))
    await house.start()
    try:
        model = Model(house)
        await model.begin()
        job, cells = model.jobs["a"], [house.room.cells[name] for name in ("a-g0", "a-g1")]
        gate = house.room.gate = Gate("sleep")
        training = asyncio.ensure_future(model.train(job, 12))
        async with asyncio.timeout(20):
            await gate.arrived.wait()
        for cell in cells:
            cell.hang()
        house.room.gate = Gate()
        gate.opened.set()
        await training
        assert not model.trains(job), "its engines are awake"
        await house.engines["a"].kill()
        await house.engines["a"].start()
        await model.resume(job, False)
        assert [await cell.awake() for cell in cells] == [True, True]
        for _ in range(2):
            await model.train(job, 1)
        for cell in cells:
            cell.heal()
        await model.check()
        async with asyncio.timeout(20):
            while not model.trains(job):
                await model.groups.supply(job)
                await model.train(job, 1)
        await model.check()
    finally:
        await house.close()


async def test_a_lend_that_was_undone_before_it_arrived_does_not_begin(tmp_path: Path) -> None:
    """A network may keep a BeginLend that its scheduler has given up; the trainer trains when it arrives."""
    house = House(tmp_path, list(RUNS))
    await house.start()
    try:
        model = Model(house)
        await model.begin()
        job = model.jobs["c"]
        while not model.trains(job):
            await model.train(job, 1)
        stub = model.engines["c"]
        await stub.AbortLend(epb.AbortLendRequest(lend_id="late", **job.who))
        for _ in range(2):
            assert await model.reason(stub.BeginLend(epb.BeginLendRequest(lend_id="late", **job.who))) == "LEND_CLOSED"
            await model.check()
            await house.engines["c"].kill()
            await house.engines["c"].start()
    finally:
        await house.close()
