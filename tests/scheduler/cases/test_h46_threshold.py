"""H46: the threshold is rounded half to even and never below one."""

import pytest

from services.runtime.errors import Code
from tests.scheduler.world import error_of, run_config, world
from turnout.scheduler.v1 import scheduler_pb2 as pb

HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("batch", "mini_batches", "ratio", "threshold"),
    [
        (5, 5, 0.5, 2),
        (3, 3, 0.5, 2),
        (64, 4, 0.4, 26),
        (64, 4, 1e-9, 16),
        (64, 4, 1.0, 64),
        (1, 1, 0.4, 1),
        (1, 1, 1e-9, 1),
        (HUGE, HUGE, 0.5, 1073741824),
        (HUGE, HUGE, 1.0, HUGE),
    ],
)
async def test_h46_the_step_waits_for_the_rounded_threshold(
    batch: int, mini_batches: int, ratio: float, threshold: int
) -> None:
    """A threshold of 0 ends every lend before anything was generated; a wrong rounding differs from verl by a group."""
    switch = pb.SwitchConfig(enable_switch=True, switch_threshold_ratio=ratio)
    config = run_config(
        switch=switch,
        train_batch_size=batch,
        parameter_sync_step=mini_batches,
        mini_batch_size=batch // mini_batches,
    )
    async with world() as w:
        trainer = await w.trainer(config)
        assert (await trainer.begin(1)).decision.threshold == threshold
        stream = trainer.prepare_stream(1)
        first: pb.PrepareStepResponse = await stream.read()
        assert first.progress.target == threshold or first.done.decision.threshold == threshold
        stream.cancel()


async def test_h46_a_batch_smaller_than_its_mini_batches_is_refused() -> None:
    """verl's formula gives 0 there."""
    async with world() as w:
        config = run_config(train_batch_size=3, parameter_sync_step=4, mini_batch_size=0)
        error = await error_of(w.open(config))
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, "config.mini_batch_size")
