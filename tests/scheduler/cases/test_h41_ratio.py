"""H41: the adaptive ratio moves exactly once per step."""

import pytest

from tests.scheduler.world import Trainer, run_config, world
from turnout.scheduler.v1 import scheduler_pb2 as pb


async def ratios(trainer: Trainer, first_step: int, waits: str) -> list[float]:
    """The ratio in force in each of these steps, idle ("i") or calm ("c")."""
    seen = []
    for step, kind in enumerate(waits, first_step):
        ended = await trainer.step(step, wait=5.0 if kind == "i" else 0.0)
        seen.append(ended.metrics["separate_async/switch/threshold_ratio"])
    return seen


async def test_h41_the_ratio_steps_once_per_step_through_the_service() -> None:
    """A repeat or an event told twice would move it twice, and GPUs would stay lent longer than configured."""
    switch = pb.SwitchConfig(enable_switch=True, switch_threshold_ratio=0.5)
    async with world(watch_progress=False) as w:
        trainer = await w.trainer(run_config(switch=switch, total_training_steps=1000))
        await w.buffer.set_depth(16)
        assert await ratios(trainer, 1, "iiii") == pytest.approx([0.50, 0.50, 0.55, 0.60], abs=1e-9)
        assert await ratios(trainer, 5, "cccc") == pytest.approx([0.65, 0.65, 0.62, 0.59], abs=1e-9)
        alternating = await ratios(trainer, 9, "ic" * 10)
        # The first calm streak was broken by an idle step: nothing moves while they alternate.
        assert alternating == pytest.approx([0.56] * 20, abs=1e-9)
        idle = await ratios(trainer, 29, "i" * 12)
        assert idle[-1] == 1.0
        assert max(idle) == 1.0
        calm = await ratios(trainer, 41, "c" * 29)
        assert calm[-1] == 0.25
