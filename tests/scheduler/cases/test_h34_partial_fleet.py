"""H34: one of four replicas does not get free; the scheduler must not let the trainer train."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio
import pytest

from services.runtime.errors import Code, TurnoutError, aborted
from tests.scheduler.fakes import host_engine, partial
from tests.scheduler.world import Trainer, World, error_of, world
from turnout.scheduler.v1 import events_pb2

Recover = Callable[[], Awaitable[None]]


async def raises(w: World) -> Recover:
    w.engine.script.failures["Reclaim"] = [partial("op-1", "hybrid-3")]

    async def recover() -> None:
        return None

    return recover


async def hangs(w: World) -> Recover:
    gate = w.engine.script.gates["Reclaim"] = asyncio.Event()

    async def recover() -> None:
        gate.set()

    return recover


async def loses_its_reply(w: World) -> Recover:
    """It was done, and nobody heard."""
    free = w.engine._free

    async def free_in_silence(operation_id: str) -> None:
        await free(operation_id)
        w.engine._free = free  # type: ignore[method-assign]
        raise aborted("CANCELLED", "the reply was lost")

    w.engine._free = free_in_silence  # type: ignore[method-assign]

    async def recover() -> None:
        return None

    return recover


@pytest.mark.parametrize("fault", [raises, hangs, loses_its_reply], ids=lambda fault: str(fault.__name__))
async def test_h34_the_trainer_is_refused_until_all_four_are_free(fault: Callable[[World], Awaitable[Recover]]) -> None:
    """A fleet in a mixed state that is reported as free crashes the trainer's first allocation."""
    async with world(hybrids=4, transition_timeout_s=0.3, transition_attempts=1) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        recover = await fault(w)
        error = await error_of(trainer.begin(1))
        assert (error.code, error.reason) == (Code.ABORTED, "RECLAIM_FAILED")
        assert error.metadata["mode"] == "RECLAIMING"
        run = await trainer.run()
        assert run.mode == events_pb2.MODE_RECLAIMING
        assert run.stuck_reason
        assert run.expected_calls[0] == "BeginStep(step=1)"
        assert (await error_of(trainer.prepare(1))).reason == "OUT_OF_ORDER"
        await recover()
        began = await trainer.begin(1)
        assert began.mode == events_pb2.MODE_TRAINER
        assert (await trainer.run()).reclaims == 1


async def test_h34_a_controller_that_dies_mid_call_is_tried_again() -> None:
    """The operation may have been done or not; only a confirmed answer counts."""
    async with world(hybrids=4, transition_attempts=1, peer_timeout_s=1.0) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        w.engine.script.gates["Reclaim"] = asyncio.Event()
        beginning = asyncio.ensure_future(error_of(trainer.begin(1)))
        await w.engine.script.arrived["Reclaim"].wait()
        target = w.engine_host.target
        await w.engine_host.stop(0)
        error: TurnoutError = await beginning
        assert error.reason == "RECLAIM_FAILED"
        assert error.metadata["cause"] in ("ENGINE_UNREACHABLE", "INTERNAL")
        assert (await trainer.run()).mode == events_pb2.MODE_RECLAIMING
        w.engine.script.gates.clear()
        async with host_engine(w.engine, listen=target):
            assert await repeated(trainer) == events_pb2.MODE_TRAINER


async def repeated(trainer: Trainer) -> events_pb2.Mode.ValueType:
    """BeginStep as a client repeats it, until the channel to the restarted controller is up again."""
    for _ in range(100):
        try:
            return (await trainer.begin(1)).mode
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.05)
    raise AssertionError("the controller was not found again")
