"""H45: a huge first cost leaves the window."""

import asyncio

from services.runtime.clock import ManualClock
from tests.scheduler.world import Trainer, World, run_config, world
from turnout.scheduler.v1 import scheduler_pb2 as pb


async def cycle(w: World, clock: ManualClock, trainer: Trainer, step: int, lend_s: float | None) -> pb.EndStepResponse:
    """A step that begins with a reclaim of 5 s and, with `lend_s`, ends with a lend of that cost."""
    await w.buffer.set_depth(16)
    gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
    arrived = w.engine.script.arrived["Reclaim"] = asyncio.Event()
    beginning = asyncio.ensure_future(trainer.begin(step))
    if (await trainer.run()).mode != 1:
        await arrived.wait()
        await clock.advance(5.0)
    gate.set()
    await beginning
    await trainer.prepare(step)
    for mini_batch in range(4):
        await trainer.sample(step, mini_batch)
    await w.buffer.set_depth(0 if lend_s is not None else 16)
    ended = await trainer.end(step)
    if lend_s is not None:
        await trainer.complete(ended.lend, hybrid=lend_s)
    return ended


async def test_h45_the_cold_cost_leaves_the_window_and_both_directions_stay_apart() -> None:
    """With a cold first lend in the mean for ever, a job would never lend again."""
    clock = ManualClock()
    async with world(clock=clock, watch_progress=False) as w:
        trainer = await w.trainer(run_config(total_training_steps=1000))
        costs = []
        for step, lend_s in enumerate([1000.0, 2.0, 2.0, 2.0, 2.0], 1):
            ended = await cycle(w, clock, trainer, step, lend_s)
            costs.append(ended.decision.numbers.get("effective_switch_cost_seconds"))
        assert costs == [None, 1005.0, 501.0 + 5.0, 1004.0 / 3 + 5.0, 7.0]
        first_calm = await cycle(w, clock, trainer, 6, None)
        for step in range(7, 107):
            await clock.advance(60.0)
            last = await trainer.step(step)
        numbers = last.decision.numbers
        assert numbers["effective_switch_cost_seconds"] == 7.0
        assert (numbers["lend_cost_seconds"], numbers["reclaim_cost_seconds"]) == (2.0, 5.0)
        aged = numbers["lend_cost_age_seconds"] - first_calm.decision.numbers["lend_cost_age_seconds"]
        assert aged == 6000.0


async def test_h45_a_window_of_one_forgets_at_once() -> None:
    """The smallest window is the last cost alone."""
    clock = ManualClock()
    switch = pb.SwitchConfig(enable_switch=True, switch_threshold_ratio=0.5, switch_cost_window_size=1)
    async with world(clock=clock, watch_progress=False) as w:
        trainer = await w.trainer(run_config(switch=switch))
        for step, lend_s in enumerate([1000.0, 2.0], 1):
            await cycle(w, clock, trainer, step, lend_s)
        ended = await cycle(w, clock, trainer, 3, None)
        assert ended.decision.numbers["effective_switch_cost_seconds"] == 7.0
