"""Lost replies, repeats, and calls that are dropped on the way."""

import asyncio

import pytest

from services.runtime.errors import Code, unavailable
from tests.scheduler.world import Trainer, error_of, rest_of, run_config, wall, world
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb


async def test_every_call_of_a_step_may_be_repeated() -> None:
    """Each reply can get lost; a repeat that did the work again would lend or count twice."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        assert await trainer.begin(1) == await trainer.begin(1)
        assert await trainer.prepare(1) == await trainer.prepare(1)
        for mini_batch in range(4):
            assert await trainer.begin_sample(1, mini_batch) == await trainer.begin_sample(1, mini_batch)
            await trainer.end_sample(1, mini_batch, wait=1.0)
            await trainer.end_sample(1, mini_batch, wait=1.0)
        await w.buffer.set_depth(0)
        w.moves()
        ended = await trainer.end(1)
        assert await trainer.end(1) == ended
        assert w.moves() == ["BeginLend"]
        assert await trainer.complete(ended.lend) == await trainer.complete(ended.lend)
        assert w.moves() == ["FinishLend"]
        kinds = [event.WhichOneof("event") for event in await trainer.events()]
        counts = {kind: kinds.count(kind) for kind in kinds}
        assert counts["step_began"] == counts["step_ended"] == 1
        assert counts["mini_batch_began"] == counts["mini_batch_ended"] == 4
        assert counts["lend_done"] == 2


async def test_a_repeat_with_other_content_is_refused() -> None:
    """Answering it as the first would hide that the trainer reports two different waits."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        await trainer.begin(1)
        await trainer.prepare(1)
        await trainer.sample(1, 0, wait=1.0)
        error = await error_of(trainer.end_sample(1, 0, wait=2.0))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "CALL_CHANGED")


async def test_a_dropped_call_goes_on_and_its_repeat_joins() -> None:
    """A trainer whose deadline passes in a slow reclaim must not start a second one."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
        call = w.stub.BeginStep(pb.BeginStepRequest(run_id="run", epoch=trainer.epoch, step=1))
        waiting = asyncio.ensure_future(asyncio.wait_for(call, 30))
        await w.engine.script.arrived["Reclaim"].wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await trainer.run()).mode == events_pb2.MODE_RECLAIMING
        joined = [asyncio.ensure_future(trainer.begin(1)) for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
        first, second = await asyncio.gather(*joined)
        assert first.reclaimed
        assert first == second
        assert w.moves().count("Reclaim") == 1


async def test_a_joining_repeat_with_other_content_is_refused() -> None:
    """The one under way may be answered with what the other trainer thread meant."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
        first = asyncio.ensure_future(trainer.begin(1))
        await w.engine.script.arrived["Reclaim"].wait()
        changed = pb.BeginStepRequest(run_id="run", epoch=trainer.epoch, step=1, standalone_update=wall(3.0))
        assert (await error_of(w.stub.BeginStep(changed))).reason == "CALL_CHANGED"
        gate.set()
        assert (await first).reclaimed


async def test_a_failed_call_changes_nothing_and_may_be_repeated() -> None:
    """A buffer that is down for a moment must not leave a step half begun."""
    async with world() as w:
        trainer = await w.trainer()
        w.buffer.script.failures["GetSampleableCount"] = [unavailable("DRAINING", "stopping")] * 3
        assert (await error_of(trainer.begin(1))).code is Code.UNAVAILABLE
        assert (await trainer.run()).expected_calls[0] == "BeginStep(step=1)"
        w.buffer.script.failures["GetSampleableCount"].clear()
        await w.buffer.set_depth(8)
        assert (await trainer.begin(1)).reclaimed
        await trainer.prepare(1)
        w.buffer.script.failures["GetSampleableCount"].append(unavailable("DRAINING", "stopping"))
        assert (await error_of(trainer.begin_sample(1, 0))).code is Code.UNAVAILABLE
        for mini_batch in range(4):
            await trainer.sample(1, mini_batch)
        w.buffer.script.failures["GetSampleableCount"].append(unavailable("DRAINING", "stopping"))
        assert (await error_of(trainer.end(1))).code is Code.UNAVAILABLE
        await trainer.end(1)
        kinds = [event.WhichOneof("event") for event in await trainer.events()]
        assert kinds.count("step_began") == kinds.count("step_ended") == 1
        assert kinds.count("mini_batch_began") == 4


async def test_two_calls_of_one_trainer_take_turns() -> None:
    """CompleteLend and AbandonLend of one lend at once: one of them wins, and the other learns how."""
    async with world() as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        gate = w.engine.script.gates["FinishLend"] = asyncio.Event()
        completing = asyncio.ensure_future(trainer.complete(opened.lend))
        await w.engine.script.arrived["FinishLend"].wait()
        abandoning = asyncio.ensure_future(error_of(trainer.abandon(opened.lend)))
        await asyncio.sleep(0)
        gate.set()
        assert (await completing).mode == events_pb2.MODE_ROLLOUT
        assert (await abandoning).code is Code.FAILED_PRECONDITION
        assert "AbortLend" not in w.moves()


async def test_a_call_out_of_order_is_refused_at_once_while_another_waits() -> None:
    """It hung until the wait ended, for hours perhaps, and was then done though its caller had long given up."""
    async with world() as w:
        trainer = await w.trainer()
        await trainer.begin(1)
        waiting = trainer.prepare_stream(1)
        assert (await waiting.read()).HasField("progress")
        for call in (trainer.end(1), trainer.begin_sample(1, 0), trainer.begin(2), trainer.save(1)):
            assert (await error_of(asyncio.wait_for(call, 20))).reason == "OUT_OF_ORDER"
        await w.buffer.set_depth(8)
        assert (await rest_of(waiting))[-1].done.reclaimed


async def test_end_sample_needs_a_wait() -> None:
    """A trainer that leaves it out would be taken for one that never waits, and never be lent anything."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        await trainer.begin(1)
        await trainer.prepare(1)
        await trainer.begin_sample(1, 0)
        request = pb.EndSampleRequest(run_id="run", epoch=trainer.epoch, step=1, mini_batch=0)
        error = await error_of(w.stub.EndSample(request))
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, "wait")
        request.wait.CopyFrom(wall(-1.0))
        assert (await error_of(w.stub.EndSample(request))).metadata["field"] == "wait"
        request.wait.CopyFrom(wall(1.0))
        request.tokens = -5
        assert (await error_of(w.stub.EndSample(request))).metadata["field"] == "tokens"
        request.tokens = 5
        await w.stub.EndSample(request)


async def test_lends_are_closed_once_and_say_how() -> None:
    """A lend closed twice in different ways would leave trainer and engines with different ideas."""
    async with world() as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        assert (await error_of(trainer.complete(pb.Lend(lend_id="other")))).reason == "LEND_UNKNOWN"
        assert (await error_of(trainer.abandon(pb.Lend(lend_id="other")))).code is Code.NOT_FOUND
        await trainer.abandon(opened.lend)
        assert (await trainer.abandon(opened.lend)).mode == events_pb2.MODE_TRAINER
        error = await error_of(trainer.complete(opened.lend))
        assert (error.reason, error.metadata["closed"]) == ("LEND_CLOSED", "abandoned")
        await w.buffer.set_depth(8)
        began = await trainer.begin(1)
        assert not began.reclaimed

        validation = None
        await trainer.prepare(1)
        for mini_batch in range(4):
            await trainer.sample(1, mini_batch)
        await w.buffer.set_depth(8)
        await trainer.end(1)
        validation = (await trainer.begin_validation(1)).lend
        await trainer.complete(validation)
        error = await error_of(trainer.abandon(validation))
        assert (error.reason, error.metadata["closed"]) == ("LEND_CLOSED", "completed")


async def test_completing_a_lend_again_is_ok_long_after_it() -> None:
    """Also in a later epoch, when the stored answer is gone: the lend is complete and costs what it cost."""
    async with world() as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        first = await trainer.complete(opened.lend)
        again = await w.open(take_over=True, resume=pb.Resume(keep_live=True))
        successor = Trainer(w.stub, again.epoch)
        assert (await successor.complete(opened.lend)).cost == first.cost
