"""The order of calls, row by row as the design's table has it."""

import pytest

from services.runtime.errors import Code
from tests.scheduler.world import Trainer, error_of, rest_of, run_config, world
from turnout.buffer.v1 import buffer_pb2
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb

TRAINER, ROLLOUT = events_pb2.MODE_TRAINER, events_pb2.MODE_ROLLOUT


async def test_row_init_lends_and_serves_also_with_switching_off() -> None:
    """The first weights must reach every replica; a job without switching generates its warm-up on all GPUs too."""
    async with world() as w:
        opened = await w.open(run_config(on=False))
        assert opened.lend.kind == events_pb2.LEND_KIND_INIT
        assert list(opened.lend.replica_ids) == []
        trainer = Trainer(w.stub, opened.epoch)
        completed = await trainer.complete(opened.lend)
        assert completed.mode == ROLLOUT
        assert dict(completed.metrics) == {}
        assert w.moves() == ["BeginLend", "FinishLend"]


async def test_row_init_begins_the_lend_at_complete_when_hybrids_register_late() -> None:
    """Trainers register their replicas after OpenRun answered; there is nothing to hold before that."""
    async with world(hybrids=0) as w:
        opened = await w.open()
        assert w.moves() == []
        w.engine.add("hybrid-late")
        completed = await Trainer(w.stub, opened.epoch).complete(opened.lend)
        assert completed.mode == ROLLOUT
        assert w.moves() == ["BeginLend", "FinishLend"]


async def test_row_init_is_not_in_the_cost_window() -> None:
    """Cold engines cost many times what a later lend costs."""
    async with world() as w:
        trainer = await w.trainer()
        lends = [event.lend_done for event in await trainer.events() if event.HasField("lend_done")]
        assert [(lend.kind, lend.counted) for lend in lends] == [(events_pb2.LEND_KIND_INIT, False)]


async def test_row_resume_needs_a_checkpoint_or_keep_live() -> None:
    """A trainer that restarts elsewhere than its data would train on groups of the wrong age."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(16)
        await trainer.step(1)
        w.buffer.runs["run"].current_step = 1
        error = await error_of(w.open(take_over=True))
        assert error.reason == "RESUME_MISMATCH"
        assert error.metadata["scheduler_step"] == "1"
        assert error.metadata["buffer_step"] == "1"
        opened = await w.open(take_over=True, resume=pb.Resume(resume_step=1, keep_live=True))
        assert opened.next_step == 2
        assert opened.epoch == 2
        assert opened.lend.weight_version == 1
        assert opened.lend.allow_older


async def test_every_lend_of_a_resumed_trainer_may_bring_older_weights() -> None:
    """After an abandoned first lend, engines with newer weights refused all later ones until training passed them."""
    async with world() as w:
        await w.trainer()
        opened = await w.open(take_over=True, resume=pb.Resume(resume_step=0, keep_live=True))
        trainer = Trainer(w.stub, opened.epoch)
        await trainer.abandon(opened.lend)
        validation = await trainer.begin_validation(0)
        assert validation.lend.allow_older
        await trainer.abandon(validation.lend)
        await trainer.end_validation(0)
        await w.buffer.set_depth(8)
        await trainer.begin(1)
        await trainer.prepare(1)
        for mini_batch in range(4):
            await trainer.sample(1, mini_batch)
        await w.buffer.set_depth(0)
        assert (await trainer.end(1)).lend.allow_older


async def test_row_warm_up_tops_up_to_its_target() -> None:
    """A resumed job whose buffer is full must not add its warm-up again."""
    async with world() as w:
        await w.buffer.set_depth(0, in_flight=10, finished=4)
        opened = await w.open(run_config(num_warmup_batches=1.5))
        assert opened.warmup_groups == 24 - 14


async def test_row_begin_step_reclaims_when_switching_is_off() -> None:
    """Without switching the trainer trains on its own GPUs from the first step on, whatever the depth."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        w.moves()
        began = await trainer.begin(1)
        assert began.reclaimed
        assert began.mode == TRAINER
        assert w.moves() == ["Reclaim"]


async def test_row_begin_step_reclaims_at_the_threshold() -> None:
    """Waiting with enough groups at hand is time the trainer loses."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        began = await trainer.begin(1)
        assert began.reclaimed
        assert began.mode == TRAINER
        assert began.decision.action == events_pb2.DECISION_ACTION_RECLAIM
        assert began.decision.numbers["sampleable_count"] == 8


async def test_row_begin_step_keeps_the_gpus_lent_below_the_threshold() -> None:
    """One group less than the threshold is not enough."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(7)
        w.moves()
        began = await trainer.begin(1)
        assert not began.reclaimed
        assert began.mode == ROLLOUT
        assert w.moves() == []


async def test_row_prepare_step_waits_for_the_threshold_and_reclaims() -> None:
    """This wait is what the whole service is for."""
    async with world() as w:
        trainer = await w.trainer()
        await trainer.begin(1)
        stream = trainer.prepare_stream(1)
        first = await stream.read()
        assert first.progress.target == 8
        w.moves()
        w.buffer.evicted = 3
        await w.buffer.set_depth(8)
        done = (await rest_of(stream))[-1].done
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        assert done.reclaimed
        assert done.mode == TRAINER
        assert done.next_cursor == 3
        assert done.evictions.evicted == 3
        assert done.metrics["training/off_policy/evicted_samples"] == 3
        assert done.metrics["timing_s/switch_wait"] > 0
        assert "timing_s/switch_to_trainer" in done.metrics
        assert w.moves() == ["Reclaim"]


async def test_row_prepare_step_answers_at_once_when_nothing_is_lent() -> None:
    """A wait that takes no time must say 0.0, as verl logs it."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        await trainer.begin(1)
        done = await trainer.prepare(1)
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        assert not done.reclaimed
        assert done.metrics["timing_s/switch_wait"] == 0.0


async def test_row_prepare_step_reclaims_and_says_so_when_supply_cannot_reach() -> None:
    """At the end of the data the threshold is never reached, and a trainer that waits for it waits for ever."""
    async with world() as w:
        trainer = await w.trainer()
        await trainer.begin(1)
        await w.buffer.set_depth(3, in_flight=2, unpaid=1)
        done = await trainer.prepare(1)
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_EXHAUSTED
        assert done.mode == TRAINER
        assert done.reclaimed
        assert "at most 6" in done.reason
        assert (await trainer.end(1)).HasField("decision"), "a step whose data ran out may end without a mini-batch"


async def test_row_prepare_step_counts_unpaid_credits_as_supply() -> None:
    """Refills that the trainer has yet to add will come; giving up before them would end the lend too early."""
    async with world() as w:
        trainer = await w.trainer()
        await trainer.begin(1)
        await w.buffer.set_depth(3, in_flight=2, unpaid=3)
        stream = trainer.prepare_stream(1)
        assert (await stream.read()).progress.depth.unpaid_credits == 3
        await w.buffer.set_depth(8)
        assert (await rest_of(stream))[-1].done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED


async def test_row_begin_sample_proceeds_and_end_sample_takes_the_wait() -> None:
    """verl never lends within a step, and the wait of a mini-batch is what its policy learns from."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.begin(1)
        await trainer.prepare(1)
        await w.buffer.set_depth(1)
        done = await trainer.begin_sample(1, 0)
        assert done.proceed.sampleable == 1
        await trainer.end_sample(1, 0, wait=30.0)
        for mini_batch in range(1, 4):
            await w.buffer.set_depth(8)
            await trainer.sample(1, mini_batch)
        ended = await trainer.end(1)
        assert ended.metrics["separate_async/switch/wait_samples"] == 3
        assert ended.metrics["separate_async/switch/idle"] == 1
        assert ended.metrics["separate_async/decision/per_sample_time_seconds"] == 10.0


async def test_row_end_step_lends_when_it_pays() -> None:
    """BeginLend comes with the decision; standalone replicas are updated first."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.begin(1)
        w.moves()
        await trainer.prepare(1)
        for mini_batch in range(4):
            await trainer.sample(1, mini_batch)
        await w.buffer.set_depth(3)
        ended = await trainer.end(1)
        assert ended.lend.kind == events_pb2.LEND_KIND_STEP_END
        assert ended.lend.update_standalone
        assert w.moves() == ["BeginLend"]
        completed = await trainer.complete(ended.lend, hybrid=3.0, standalone=100.0)
        assert w.moves() == ["FinishLend"]
        cost_s = completed.cost.ToNanoseconds() / 1e9
        assert 3.0 <= cost_s < 10.0, "the standalone update is not part of the cost"
        assert completed.metrics["timing_s/switch_to_rollout"] == pytest.approx(cost_s)


async def test_row_end_step_does_not_lend_when_enough_is_there() -> None:
    """Lending with the next threshold met costs two switches for nothing."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        ended = await trainer.step(1)
        assert not ended.HasField("lend")
        assert ended.metrics["separate_async/decision/remaining"] == 0


async def test_row_last_step_never_lends() -> None:
    """After the last step nobody trains, so nothing is worth generating."""
    async with world() as w:
        trainer = await w.trainer(run_config(total_training_steps=1))
        await w.buffer.set_depth(8)
        await trainer.begin(1)
        await trainer.prepare(1)
        for mini_batch in range(4):
            await trainer.sample(1, mini_batch)
        await w.buffer.set_depth(0)
        ended = await trainer.end(1)
        assert not ended.HasField("lend")
        assert ended.metrics["separate_async/decision/remaining"] == 8


async def test_row_validation_lends_without_clearing_sessions_and_leaves_the_gpus_lent() -> None:
    """Validation on half the GPUs takes twice as long; taking them back after it would be a switch for nothing."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.step(1)
        w.moves()
        began = await trainer.begin_validation(1)
        assert began.lend.kind == events_pb2.LEND_KIND_VALIDATION
        assert began.lend.weight_version == 1
        assert not began.lend.update_standalone
        assert w.engine.requests[-1].keep_sessions
        await trainer.complete(began.lend)
        await trainer.end_validation(1)
        assert (await trainer.run()).mode == ROLLOUT
        assert w.moves() == ["BeginLend", "FinishLend"]
        run = await trainer.run()
        assert run.lends == 1
        lends = [event.lend_done for event in await trainer.events() if event.HasField("lend_done")]
        assert [lend.counted for lend in lends] == [False, False]


async def test_row_validation_while_lent_needs_no_lend() -> None:
    """Before the first step all GPUs generate already."""
    async with world() as w:
        trainer = await w.trainer()
        w.moves()
        assert not (await trainer.begin_validation(0)).HasField("lend")
        await trainer.end_validation(0)
        assert w.moves() == []


async def test_row_save_keeps_buffer_and_scheduler_under_one_id() -> None:
    """A resume needs both from the same moment."""
    async with world() as w:
        trainer = await w.trainer()
        await w.buffer.set_depth(8)
        await trainer.step(1)
        saved = await trainer.save(1)
        assert w.buffer.checkpoints == [saved.checkpoint_id]
        again = await trainer.save(1)
        assert again == saved
        w.buffer.runs["run"].current_step = 1
        opened = await w.open(
            take_over=True, resume=pb.Resume(resume_step=1, checkpoint_id=saved.checkpoint_id), request_id="r1"
        )
        assert opened.cursor == 17
        assert opened.next_step == 2
        assert "Restore" in w.journal


async def test_row_save_says_plainly_that_the_buffer_keeps_no_checkpoints() -> None:
    """A trainer that believes it saved would lose a day's work."""
    async with world() as w:
        w.buffer.unimplemented.add("Checkpoint")
        trainer = await w.trainer()
        error = await error_of(trainer.save(0))
        assert (error.code, error.reason) == (Code.UNIMPLEMENTED, "CHECKPOINTS_UNAVAILABLE")


async def test_row_save_over_external_data_keeps_scheduler_state_alone() -> None:
    """Over TransferQueue the data is saved by its own means."""
    async with world() as w:
        w.buffer.unimplemented.update(("Checkpoint", "Restore"))
        trainer = await w.trainer(run_config(external_data=True))
        saved = await trainer.save(0)
        opened = await w.open(
            run_config(external_data=True),
            take_over=True,
            resume=pb.Resume(resume_step=0, checkpoint_id=saved.checkpoint_id),
        )
        assert opened.next_step == 1


async def test_calls_out_of_order_are_refused_through_the_service() -> None:
    """The state machine is tested on its own; this proves that the service asks it."""
    async with world() as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        error = await error_of(trainer.begin(1))
        assert error.reason == "OUT_OF_ORDER"
        assert error.metadata["expected"] == f"CompleteLend(lend_id={opened.lend.lend_id})"
        await trainer.complete(opened.lend)
        for wrong in (trainer.begin(2), trainer.prepare(1), trainer.begin_sample(1, 0), trainer.end(0)):
            assert (await error_of(wrong)).reason == "OUT_OF_ORDER"
        run = await trainer.run()
        assert list(run.expected_calls) == ["BeginStep(step=1)", "BeginValidation(step=0)", "Save(step=0)"]
