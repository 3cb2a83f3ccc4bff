"""H44: a reclaim is confirmed before the trainer is told, is repeatable, and races with nothing.

What happens within the reclaim (unroute, abort and drain, sleep) is the engine controller's part of the case.
"""

import asyncio

from services.runtime.errors import Code
from tests.scheduler.fakes import partial
from tests.scheduler.world import error_of, world
from turnout.scheduler.v1 import events_pb2


async def test_h44_the_trainer_is_told_last() -> None:
    """ "trainer" before "confirmed free" is a race for the same memory."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
        w.journal.clear()
        beginning = asyncio.ensure_future(trainer.begin(1))
        await w.engine.script.arrived["Reclaim"].wait()
        assert (await trainer.run()).mode == events_pb2.MODE_RECLAIMING
        assert not beginning.done()
        gate.set()
        assert (await beginning).mode == events_pb2.MODE_TRAINER
        assert w.journal[:3] == ["GetSampleableCount", "Reclaim", "ListReplicas"]
        order = [e.WhichOneof("event") for e in await trainer.events()][-3:]
        assert order == ["mode_changed", "reclaim_done", "mode_changed"]


async def test_h44_a_failed_sleep_is_reclaiming_and_repeatable_and_a_second_reclaim_does_nothing() -> None:
    """The retry must act on what is left, and the one after that on nothing."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        w.engine.script.failures["Reclaim"] = [partial("op-1", "hybrid-0")]
        error = await error_of(trainer.begin(1))
        assert (error.code, error.metadata["mode"]) == (Code.ABORTED, "RECLAIMING")
        assert (await trainer.run()).mode == events_pb2.MODE_RECLAIMING
        assert (await trainer.begin(1)).mode == events_pb2.MODE_TRAINER
        w.moves()
        assert (await trainer.begin(1)).mode == events_pb2.MODE_TRAINER
        assert not (await trainer.prepare(1)).reclaimed
        assert w.moves() == []


async def test_h44_a_lend_cannot_race_with_a_reclaim() -> None:
    """Whoever asks for the next lend while GPUs are on their way back is told to wait for the reclaim."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
        beginning = asyncio.ensure_future(trainer.begin(1))
        await w.engine.script.arrived["Reclaim"].wait()
        w.moves()
        racing = [asyncio.ensure_future(error_of(call)) for call in (trainer.end(1), trainer.begin_validation(0))]
        await asyncio.wait(racing, timeout=0.05)
        gate.set()
        assert (await beginning).mode == events_pb2.MODE_TRAINER
        assert [error.reason for error in await asyncio.gather(*racing)] == ["OUT_OF_ORDER", "OUT_OF_ORDER"]
        assert "BeginLend" not in w.moves()
