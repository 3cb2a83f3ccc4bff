"""Moving GPUs when something does not go as it should."""

import asyncio
from typing import Any

import pytest

from services.runtime.clock import ManualClock
from services.runtime.errors import Code, failed_precondition, not_found, unavailable
from tests.scheduler.fakes import partial
from tests.scheduler.world import Trainer, World, error_of, run_config, world
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb

TRAINER, LENDING, ROLLOUT, RECLAIMING = (
    events_pb2.MODE_TRAINER,
    events_pb2.MODE_LENDING,
    events_pb2.MODE_ROLLOUT,
    events_pb2.MODE_RECLAIMING,
)


async def at_step_end(w: World, trainer: Trainer, step: int = 1) -> None:
    """Everything of a step but EndStep, with a lend to be decided."""
    await w.buffer.set_depth(8)
    await trainer.begin(step)
    await trainer.prepare(step)
    for mini_batch in range(4):
        await trainer.sample(step, mini_batch)
    await w.buffer.set_depth(0)
    w.moves()


async def test_a_reclaim_that_fails_keeps_the_trainer_from_training_until_it_succeeds() -> None:
    """A trainer that begins on GPUs that are not free crashes, or worse, slows to a crawl."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        w.engine.stubborn.add("hybrid-1")
        w.moves()
        error = await error_of(trainer.begin(1))
        assert (error.code, error.reason) == (Code.ABORTED, "RECLAIM_FAILED")
        assert error.metadata["operation_id"] == "op-reclaim"
        assert error.metadata["mode"] == "RECLAIMING"
        assert error.metadata["failure.0"] == "hybrid-1: TIMED_OUT"
        run = await trainer.run()
        assert run.mode == RECLAIMING
        assert "1 replicas did not" in run.stuck_reason
        for _ in range(2):
            assert (await error_of(trainer.begin(1))).reason == "RECLAIM_FAILED"
        w.engine.stubborn.clear()
        began = await trainer.begin(1)
        assert began.mode == TRAINER
        assert (await trainer.run()).stuck_reason == ""
        assert w.moves() == ["Reclaim"] * 4
        failed = [e.transition_failed for e in await trainer.events() if e.HasField("transition_failed")]
        assert [(f.transition, f.reason, f.operation_id) for f in failed] == [
            (events_pb2.TRANSITION_RECLAIM, "PARTIAL", "op-reclaim")
        ] * 3
        assert (await trainer.run()).reclaims == 1


async def test_a_failure_that_passes_is_tried_again_within_the_call() -> None:
    """A controller that restarts in the middle must not cost the trainer an error."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        w.engine.script.failures["Reclaim"] = [unavailable("DRAINING", "stopping")] * 2
        w.moves()
        assert (await trainer.begin(1)).reclaimed
        assert w.moves() == ["Reclaim"] * 3


async def test_a_reclaim_that_claims_success_is_believed_only_when_every_replica_is_free() -> None:
    """An engine that answers OK and keeps its memory must not be taken at its word."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)

        async def claim_success(operation_id: str) -> None:
            for replica in w.engine.hybrids():
                replica.confirmed_free = replica.spec.replica_id != "hybrid-0"

        w.engine._free = claim_success  # type: ignore[method-assign]
        error = await error_of(trainer.begin(1))
        assert error.reason == "RECLAIM_FAILED"
        assert error.metadata["cause"] == "NOT_CONFIRMED_FREE"
        assert error.metadata["replicas"] == "hybrid-0"


async def test_a_lend_that_does_not_begin_is_undone_and_the_trainer_proceeds() -> None:
    """Lending is an offer; a trainer must never stop because it could not be made."""
    async with world() as w:
        trainer = await w.trainer()
        await at_step_end(w, trainer)
        w.engine.script.failures["BeginLend"] = [partial("op-7", "hybrid-0")]
        ended = await trainer.end(1)
        assert not ended.HasField("lend")
        assert "lend failed" in ended.lend_failure
        assert ended.decision.action == events_pb2.DECISION_ACTION_LEND
        assert w.moves() == ["BeginLend", "AbortLend"]
        assert (await trainer.run()).mode == TRAINER
        assert await trainer.end(1) == ended
        abandoned = [e.lend_abandoned for e in await trainer.events() if e.HasField("lend_abandoned")]
        assert len(abandoned) == 1
        await trainer.begin(2)


async def test_a_lend_that_can_neither_begin_nor_be_undone_blocks_the_next_step() -> None:
    """Half-awake replicas hold memory that the trainer needs."""
    async with world() as w:
        trainer = await w.trainer()
        await at_step_end(w, trainer)
        w.engine.script.failures["BeginLend"] = [partial("op-7", "hybrid-0")]
        w.engine.script.failures["AbortLend"] = [partial("op-8", "hybrid-0")] * 2
        ended = await trainer.end(1)
        assert ended.lend_failure
        assert (await trainer.run()).mode == RECLAIMING
        error = await error_of(trainer.begin(2))
        assert (error.reason, error.metadata["operation_id"]) == ("ABORT_LEND_FAILED", "op-8")
        assert (await trainer.begin(2)).mode == TRAINER
        assert w.moves() == ["BeginLend", "AbortLend", "AbortLend", "AbortLend"]


@pytest.mark.parametrize("error", [not_found("LEND_UNKNOWN", "no"), failed_precondition("LEND_CLOSED", "no")])
async def test_a_controller_that_forgot_the_lend_is_asked_to_reclaim_instead(error: Exception) -> None:
    """A controller restarts without its lends; what it left awake must still come back."""
    async with world() as w:
        trainer = await w.trainer()
        await at_step_end(w, trainer)
        ended = await trainer.end(1)
        w.engine.script.failures["AbortLend"].append(error)  # type: ignore[arg-type]
        w.moves()
        assert (await trainer.abandon(ended.lend)).mode == TRAINER
        assert w.moves() == ["AbortLend", "Reclaim"]


async def test_completing_a_lend_is_ok_when_one_replica_serves_and_names_the_others() -> None:
    """One broken engine of four must not stop the other three from generating."""
    async with world() as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        w.engine.deaf.add("hybrid-1")
        completed = await trainer.complete(opened.lend)
        assert completed.mode == ROLLOUT
        assert list(completed.failed_replica_ids) == ["hybrid-1"]


async def test_completing_a_lend_fails_when_no_replica_serves_and_may_be_repeated() -> None:
    """ "ROLLOUT" with nothing serving would wait for groups that never come."""
    async with world() as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        w.engine.deaf.update(("hybrid-0", "hybrid-1"))
        error = await error_of(trainer.complete(opened.lend))
        assert (error.reason, error.metadata["operation_id"]) == ("LEND_FAILED", "op-finish")
        run = await trainer.run()
        assert run.mode == LENDING
        assert run.stuck_reason
        assert run.lend.lend_id == opened.lend.lend_id
        w.engine.deaf.clear()
        assert (await trainer.complete(opened.lend)).mode == ROLLOUT


async def test_a_lend_that_cannot_be_completed_can_be_abandoned() -> None:
    """Weights that could not be installed are no reason to stop the job."""
    async with world() as w:
        trainer = await w.trainer()
        await at_step_end(w, trainer)
        ended = await trainer.end(1)
        w.engine.deaf.update(("hybrid-0", "hybrid-1"))
        assert (await error_of(trainer.complete(ended.lend))).reason == "LEND_FAILED"
        assert (await trainer.abandon(ended.lend)).mode == TRAINER
        await trainer.begin(2)
        assert (await trainer.run()).lends == 1


async def test_an_abandoned_lend_that_cannot_be_undone_stays_open() -> None:
    """The trainer must hear that its GPUs are not free, and be able to ask again."""
    async with world() as w:
        trainer = await w.trainer()
        await at_step_end(w, trainer)
        ended = await trainer.end(1)
        w.engine.stubborn.add("hybrid-0")
        error = await error_of(trainer.abandon(ended.lend))
        assert (error.code, error.reason) == (Code.ABORTED, "ABORT_LEND_FAILED")
        assert (await error_of(trainer.begin(2))).reason == "OUT_OF_ORDER"
        w.engine.stubborn.clear()
        assert (await trainer.abandon(ended.lend)).mode == TRAINER
        await trainer.begin(2)


async def test_an_engine_that_fails_at_open_run_is_asked_again_by_complete_lend() -> None:
    """The trainer has not moved a byte yet; the start of a job must survive a slow engine."""
    async with world() as w:
        w.engine.script.failures["BeginLend"] = [partial("op-1", "hybrid-0")]
        opened = await w.open()
        assert opened.HasField("lend")
        assert (await Trainer(w.stub, opened.epoch).complete(opened.lend)).mode == ROLLOUT
        assert w.moves() == ["BeginLend", "BeginLend", "FinishLend"]


async def test_a_validation_lend_that_fails_is_an_error_that_leaves_the_trainer_its_gpus() -> None:
    """Validation has an answer for "they serve" and for "install weights", none for "half of both"."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        await trainer.step(1)
        w.engine.script.failures["BeginLend"] = [partial("op-1", "hybrid-0")]
        assert (await error_of(trainer.begin_validation(1))).reason == "LEND_FAILED"
        assert (await trainer.run()).mode == TRAINER
        await trainer.begin(2)


async def test_a_restarted_controller_is_probed_before_the_trainer_is_told_that_it_has_its_gpus() -> None:
    """What an older incarnation confirmed is not known any more."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        await trainer.step(1)
        await w.engine.restart("e2", free=False)
        news: Any = w.stub.WatchRun(pb.WatchRunRequest(run_id="run", from_sequence=1))
        changes = 0
        while changes < 5:
            changes += sum(event.HasField("mode_changed") for event in (await news.read()).events)
        news.cancel()
        run = await trainer.run()
        assert run.mode == RECLAIMING
        assert "hybrid-0" in run.stuck_reason
        w.moves()
        assert (await trainer.begin(2)).mode == TRAINER
        assert w.moves() == ["Reclaim"]


async def test_a_restarted_controller_whose_replicas_are_free_moves_nothing() -> None:
    """A restart that found everything asleep is no reason to wake the trainer with an error."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        await trainer.step(1)
        await w.engine.restart("e2", free=True)
        w.moves()
        assert (await trainer.begin(2)).mode == TRAINER
        assert w.moves() == []


async def test_a_step_does_not_begin_while_the_controller_is_down() -> None:
    """A supervisor may start an engine on the trainer's GPUs meanwhile, and only the controller would see it."""
    async with world(transition_attempts=1) as w:
        trainer = await w.trainer(run_config(on=False))
        await trainer.step(1)
        w.engine.script.failures["ListReplicas"] = [unavailable("DRAINING", "stopping")]
        assert (await error_of(trainer.begin(2))).code is Code.UNAVAILABLE
        assert (await trainer.begin(2)).mode == TRAINER


async def test_a_step_begins_with_what_engines_say_now() -> None:
    """What they told before a supervisor started them anew let the trainer allocate into their memory."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        await trainer.step(1)
        moved = len(w.engine.moves)
        w.engine.started_anew.add("hybrid-0")
        assert (await trainer.begin(2)).mode == TRAINER
        assert [call for call, _ in w.engine.moves[moved:]] == ["Reclaim"]
        assert w.engine.all_free


async def test_costs_are_measured_on_the_clock_of_the_job() -> None:
    """BeginLend + hybrid update + FinishLend is the cost of a lend; the standalone update is not."""
    clock = ManualClock()
    async with world(clock=clock) as w:
        trainer = await w.trainer()
        await at_step_end(w, trainer)
        begin = w.engine.script.gates["BeginLend"] = asyncio.Event()
        w.engine.script.arrived["BeginLend"].clear()
        ending = asyncio.ensure_future(trainer.end(1))
        await w.engine.script.arrived["BeginLend"].wait()
        await clock.advance(4.0)
        begin.set()
        ended = await ending
        await clock.advance(100.0)
        finish = w.engine.script.gates["FinishLend"] = asyncio.Event()
        w.engine.script.arrived["FinishLend"].clear()
        completing = asyncio.ensure_future(trainer.complete(ended.lend, hybrid=3.0, standalone=50.0))
        await w.engine.script.arrived["FinishLend"].wait()
        await clock.advance(2.0)
        finish.set()
        completed = await completing
        assert completed.cost.ToNanoseconds() / 1e9 == pytest.approx(4.0 + 3.0 + 2.0)
        assert completed.metrics["timing_s/switch_to_rollout"] == pytest.approx(9.0)

        await w.buffer.set_depth(8)
        reclaim = w.engine.script.gates["Reclaim"] = asyncio.Event()
        w.engine.script.arrived["Reclaim"].clear()
        beginning = asyncio.ensure_future(trainer.begin(2))
        await w.engine.script.arrived["Reclaim"].wait()
        await clock.advance(5.0)
        reclaim.set()
        assert (await beginning).reclaimed
        await trainer.prepare(2)
        for mini_batch in range(4):
            await trainer.sample(2, mini_batch)
        metrics = (await trainer.end(2)).metrics
        assert metrics["timing_s/switch_to_trainer"] == pytest.approx(5.0)
        assert metrics["timing_s/switch_wait"] == 0.0
        # Two reclaims: that of the start took no time, this one 5 s; one counted lend.
        assert metrics["separate_async/decision/effective_switch_cost_seconds"] == pytest.approx(9.0 + 2.5)
        synced = [e.sync_done for e in await trainer.events() if e.HasField("sync_done")]
        assert [(s.hybrid, s.seconds, s.weight_version) for s in synced[-2:]] == [(False, 50.0, 1), (True, 3.0, 1)]


async def test_draining_lets_a_transition_end() -> None:
    """A reclaim cut in the middle would leave replicas half asleep."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
        beginning = asyncio.ensure_future(trainer.begin(1))
        await w.engine.script.arrived["Reclaim"].wait()
        stopping = asyncio.ensure_future(w.host.stop())
        await asyncio.sleep(0.05)
        gate.set()
        assert (await beginning).reclaimed
        assert await stopping


async def test_the_engine_timeout_of_the_run_reaches_the_controller() -> None:
    """A user who sets it expects it to hold for every transition."""
    async with world() as w:
        config = run_config()
        config.engine_timeout.seconds = 7
        trainer = await w.trainer(config)
        await w.buffer.set_depth(8)
        await trainer.begin(1)
        assert {request.timeout.seconds for request in w.engine.requests} == {7}


async def test_a_weight_update_between_lends_is_told_with_begin_step() -> None:
    """Without a lend the time of the standalone update has no other way to be known."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        request = pb.BeginStepRequest(run_id="run", epoch=trainer.epoch, step=1)
        request.standalone_update.seconds = 18
        await w.stub.BeginStep(request)
        synced = [e.sync_done for e in await trainer.events() if e.HasField("sync_done")]
        assert (synced[-1].hybrid, synced[-1].seconds, synced[-1].weight_version) == (False, 18.0, 0)
        assert not synced[-1].HasField("tokens_recomputed"), "unknown is not none"


async def test_what_a_weight_update_cost_its_requests_is_an_event() -> None:
    """Reports have no other source."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        request = pb.BeginStepRequest(run_id="run", epoch=trainer.epoch, step=1)
        request.standalone_update.seconds = 18
        request.standalone_cost.tokens_recomputed = 4000
        request.standalone_cost.blackout.FromMilliseconds(1500)
        await w.stub.BeginStep(request)
        synced = [e.sync_done for e in await trainer.events() if e.HasField("sync_done")]
        assert (synced[-1].tokens_recomputed, synced[-1].blackout_seconds) == (4000, 1.5)


async def test_a_controller_that_is_down_keeps_the_trainer_from_gpus_that_were_not_confirmed() -> None:
    """Nobody knows whose they are until it answers again."""
    async with world(transition_attempts=1, peer_timeout_s=1.0) as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        w.engine.stubborn.add("hybrid-0")
        assert (await error_of(trainer.begin(1))).reason == "RECLAIM_FAILED"
        await w.engine_host.stop(0)
        error = await error_of(trainer.begin(1))
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_UNREACHABLE")


async def test_a_lend_whose_controller_dies_before_it_says_who_serves_has_failed() -> None:
    """Silence is no success."""
    async with world(transition_attempts=1, peer_timeout_s=1.0) as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        w.engine.script.failures["FinishLend"] = [partial("op-1", "hybrid-0")]
        arrived = w.engine.script.arrived["FinishLend"]

        async def die() -> None:
            await arrived.wait()
            w.engine.script.failures["ListReplicas"] = [unavailable("DRAINING", "stopping")] * 9

        dying = asyncio.ensure_future(die())
        w.engine.script.gates["FinishLend"] = arrived
        assert (await error_of(trainer.complete(opened.lend))).reason == "LEND_FAILED"
        await dying


async def test_a_lend_that_never_began_at_the_controller_cannot_be_complete() -> None:
    """A BeginLend that failed twice leaves nothing that could serve."""
    async with world(transition_attempts=1) as w:
        w.engine.script.failures["BeginLend"] = [partial("op-1", "hybrid-0")] * 2
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        assert (await error_of(trainer.complete(opened.lend))).reason == "LEND_FAILED"
        assert (await trainer.complete(opened.lend)).mode == ROLLOUT
