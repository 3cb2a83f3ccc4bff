"""The loop as a whole, the way a trainer lives it."""

from tests.scheduler.world import Trainer, world
from turnout.buffer.v1 import buffer_pb2
from turnout.scheduler.v1 import events_pb2


async def test_three_steps_lend_and_reclaim_as_the_table_says() -> None:
    """A loop that calls the engine in another order, or lends without need, would run a real job into the ground."""
    async with world() as w:
        opened = await w.open()
        assert opened.epoch == 1
        assert opened.next_step == 1
        assert opened.lend.kind == events_pb2.LEND_KIND_INIT
        assert opened.lend.weight_version == 0
        assert opened.lend.update_standalone
        assert opened.run.mode == events_pb2.MODE_LENDING
        trainer = Trainer(w.stub, opened.epoch)
        completed = await trainer.complete(opened.lend)
        assert completed.mode == events_pb2.MODE_ROLLOUT
        assert w.moves() == ["BeginLend", "FinishLend"]

        began = await trainer.begin(1)
        assert began.mode == events_pb2.MODE_ROLLOUT
        assert not began.reclaimed
        assert began.decision.threshold == 8
        await w.buffer.set_depth(8)
        done = await trainer.prepare(1)
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        assert done.reclaimed
        assert done.mode == events_pb2.MODE_TRAINER
        assert w.moves() == ["Reclaim"]
        for mini_batch in range(4):
            answer = await trainer.sample(1, mini_batch)
            assert answer.proceed.sampleable == 8
        await w.buffer.set_depth(2)
        ended = await trainer.end(1)
        assert ended.lend.kind == events_pb2.LEND_KIND_STEP_END
        assert ended.lend.weight_version == 1
        assert list(ended.lend.replica_ids) == ["hybrid-0", "hybrid-1"]
        await trainer.complete(ended.lend)
        assert w.moves() == ["BeginLend", "FinishLend"]

        await w.buffer.set_depth(12)
        began = await trainer.begin(2)
        assert began.reclaimed
        assert began.mode == events_pb2.MODE_TRAINER
        done = await trainer.prepare(2)
        assert not done.reclaimed
        for mini_batch in range(4):
            await trainer.sample(2, mini_batch)
        ended = await trainer.end(2)
        assert not ended.HasField("lend")
        assert ended.metrics["separate_async/decision/should_switch_to_rollout"] == 0
        assert w.moves() == ["Reclaim"]
        run = await trainer.run()
        assert (run.lends, run.reclaims) == (2, 2)
