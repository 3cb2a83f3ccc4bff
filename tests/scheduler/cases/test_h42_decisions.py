"""H42: when a lend pays, through the service."""

from typing import Any

import pytest

from services.runtime.clock import ManualClock
from tests.scheduler.world import Trainer, World, run_config, world
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb

LEND, KEEP = events_pb2.DECISION_ACTION_LEND, events_pb2.DECISION_ACTION_KEEP
SCALING_2 = {"hybrid_gpus": 2, "standalone_gpus": 2}


async def step(w: World, trainer: Trainer, number: int, *, wait: float, left: int) -> pb.EndStepResponse:
    """A step whose first mini-batch lacks all 4 groups for `wait` seconds, with `left` groups at its end."""
    await w.buffer.set_depth(16)
    await trainer.begin(number)
    await trainer.prepare(number)
    if wait:
        await w.buffer.set_depth(0)
    await trainer.sample(number, 0, wait)
    await w.buffer.set_depth(16)
    for mini_batch in range(1, 4):
        await trainer.sample(number, mini_batch)
    await w.buffer.set_depth(left)
    return await trainer.end(number)


async def decide(*, cost: float | None, wait: float, left: int, last: bool = False, **gpus: Any) -> pb.EndStepResponse:
    """The decision at a step's end.

    cost: what the only lend so far cost (reclaims take no time on a clock that stands still), None for no lend yet.
    wait: seconds waited for 4 groups in the step, 0 for no history. left: sampleable groups, of a threshold of 8.
    """
    async with world(clock=ManualClock(), watch_progress=False) as w:
        steps = 1 if cost is None else 2
        trainer = await w.trainer(run_config(total_training_steps=steps if last else 10, **{**SCALING_2, **gpus}))
        if cost is not None:
            ended = await step(w, trainer, 1, wait=0.0, left=0)
            assert ended.HasField("lend"), "without any history it is tried"
            await trainer.complete(ended.lend, hybrid=cost)
        return await step(w, trainer, steps, wait=wait, left=left)


@pytest.mark.parametrize(
    ("name", "action", "given"),
    [
        # Benefit: remaining x wait / 4 x (1 - 1/2). With 40 s for 4 groups: 5 s per remaining group.
        ("benefit above cost", LEND, {"cost": 39.0, "wait": 40.0, "left": 0}),
        ("benefit equal to cost", KEEP, {"cost": 40.0, "wait": 40.0, "left": 0}),
        ("benefit below cost", KEEP, {"cost": 41.0, "wait": 40.0, "left": 0}),
        ("few groups remain", KEEP, {"cost": 6.0, "wait": 40.0, "left": 7}),
        ("few groups remain, cheap", LEND, {"cost": 4.0, "wait": 40.0, "left": 7}),
        ("nothing remains", KEEP, {"cost": 1.0, "wait": 1000.0, "left": 8}),
        ("more than the threshold", KEEP, {"cost": 1.0, "wait": 1000.0, "left": 16}),
        ("last step", KEEP, {"cost": 1.0, "wait": 1000.0, "left": 0, "last": True}),
        ("last step without history", KEEP, {"cost": None, "wait": 0.0, "left": 0, "last": True}),
        ("no lend cost yet", LEND, {"cost": None, "wait": 0.4, "left": 0}),
        ("no wait history", LEND, {"cost": 1000.0, "wait": 0.0, "left": 0}),
        ("most GPUs are hybrid", LEND, {"cost": 40.0, "wait": 40.0, "left": 0, "hybrid_gpus": 6}),
        ("few GPUs are hybrid", KEEP, {"cost": 20.0, "wait": 40.0, "left": 0, "standalone_gpus": 14}),
    ],
)
async def test_h42_a_lend_is_answered_only_when_it_pays(name: str, action: int, given: dict[str, Any]) -> None:
    """A lend that costs more than it saves makes the job slower than one that never switches."""
    ended = await decide(**given)
    assert ended.decision.action == action, f"{name}: {ended.decision.reason}"
    assert ended.HasField("lend") == (action == LEND)
    assert ended.decision.numbers["remaining"] == max(0, 8 - given["left"])
    assert ended.metrics["separate_async/decision/should_switch_to_rollout"] == float(action == LEND)


async def test_h42_the_answer_carries_the_numbers_it_rests_on() -> None:
    """Nobody believes a decision that cannot be recomputed."""
    ended = await decide(cost=41.0, wait=40.0, left=0)
    numbers = ended.decision.numbers
    assert numbers["per_sample_time_seconds"] == 10.0
    assert numbers["effective_switch_cost_seconds"] == 41.0
    assert numbers["scaling_factor"] == 2.0
    assert numbers["benefit_seconds"] == 40.0
    assert ended.metrics["separate_async/decision/benefit_seconds"] == 40.0
    assert ended.metrics["separate_async/decision/per_sample_time_seconds"] == 10.0
    assert ended.metrics["separate_async/decision/effective_switch_cost_seconds"] == 41.0
    unknown = await decide(cost=None, wait=0.0, left=0)
    assert "separate_async/decision/per_sample_time_seconds" not in unknown.metrics
    assert "separate_async/decision/effective_switch_cost_seconds" not in unknown.metrics
