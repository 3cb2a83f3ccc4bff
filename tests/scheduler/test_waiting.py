"""PrepareStep and BeginSample while GPUs are lent."""

import asyncio
from typing import Any

import pytest

from services.runtime.clock import ManualClock
from services.runtime.errors import Code, failed_precondition, unavailable
from services.scheduler import policies
from services.scheduler.buffer_peer import BufferPeer
from services.scheduler.policies.base import Policy
from services.scheduler.policies.types import Action, Decision, DepthObserved, Event, Point, PolicyConfig
from services.scheduler.waiting import Wait
from tests.scheduler.fakes import host_buffer
from tests.scheduler.world import Trainer, World, error_of, rest_of, run_config, world
from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2


async def waiting_trainer(w: World) -> Trainer:
    """A trainer with its GPUs lent, about to prepare step 1."""
    trainer = await w.trainer()
    await trainer.begin(1)
    return trainer


async def test_the_events_of_the_buffer_are_forwarded_in_order() -> None:
    """A trainer with one thread refills from inside this wait; a lost REFILL_DUE is a deadlock."""
    async with world() as w:
        trainer = await waiting_trainer(w)
        stream = trainer.prepare_stream(1)
        assert (await stream.read()).HasField("progress")
        await w.buffer.refill("claim-1", 5)
        due = (await stream.read()).refill_due
        assert (due.refill_claim_id, due.count) == ("claim-1", 5)
        w.buffer.unpaid.clear()
        await w.buffer.set_depth(4)
        assert (await stream.read()).progress.depth.sampleable == 4
        await w.buffer.set_depth(8)
        assert (await rest_of(stream))[-1].done.reclaimed


async def test_a_wait_that_times_out_leaves_the_gpus_lent_and_goes_on_with_the_next_attempt() -> None:
    """A deadline in between must neither move GPUs nor lose what was evicted."""
    async with world() as w:
        trainer = await waiting_trainer(w)
        w.moves()
        done = await trainer.prepare(1, max_wait=0.05)
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_TIMED_OUT
        assert done.mode == events_pb2.MODE_ROLLOUT
        assert not done.reclaimed
        assert "timing_s/switch_to_trainer" not in done.metrics
        assert w.moves() == []
        assert (await trainer.prepare(1, max_wait=0.05)) == done, "a repeat of the first attempt gets its answer"
        assert (await error_of(rest_of(trainer.prepare_stream(1, attempt=2)))).reason == "OUT_OF_ORDER"
        await w.buffer.set_depth(8)
        again = await trainer.prepare(1, attempt=1)
        assert again.outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        assert again.metrics["timing_s/switch_wait"] >= done.metrics["timing_s/switch_wait"]


async def test_a_call_that_was_refused_leaves_nothing_for_the_one_that_may_come() -> None:
    """With the wait of the refused one, evictions would be counted from its cursor."""
    async with world() as w:
        trainer = await waiting_trainer(w)
        early = trainer.prepare_stream(1, attempt=1, cursor=3)
        assert (await error_of(rest_of(early))).reason == "OUT_OF_ORDER"
        await trainer.prepare(1, max_wait=0.05)
        await rest_of(trainer.prepare_stream(1, attempt=1, cursor=5, max_wait=0.05))
        assert w.buffer.waits[-1].cursor == 5


async def test_a_hold_that_stands_until_the_end_is_told_and_nothing_moves() -> None:
    """With a WAIT hold nothing can be sampled, so GPUs that came back early would only idle."""
    async with world() as w:
        trainer = await waiting_trainer(w)
        await w.buffer.set_depth(9, held="old-group")
        w.moves()
        done = await trainer.prepare(1, max_wait=0.05)
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_HELD
        assert done.mode == events_pb2.MODE_ROLLOUT
        assert w.moves() == []
        stream = trainer.prepare_stream(1, attempt=1)
        await stream.read()
        await w.buffer.set_depth(9)
        assert (await rest_of(stream))[-1].done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED


async def test_the_end_of_supply_ends_the_wait() -> None:
    """After the last prompt the threshold may be out of reach for ever."""
    async with world() as w:
        trainer = await waiting_trainer(w)
        stream = trainer.prepare_stream(1)
        await stream.read()
        await w.buffer.end_supply()
        done = (await rest_of(stream))[-1].done
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_EXHAUSTED
        assert done.reclaimed
        assert done.reason


async def test_a_caller_that_joins_is_shown_unpaid_refills_again_and_the_older_one_no_more() -> None:
    """Two callers that both pay a claim would add prompts twice; one that never hears of it deadlocks."""
    async with world() as w:
        trainer = await waiting_trainer(w)
        first = trainer.prepare_stream(1)
        await first.read()
        await w.buffer.refill("claim-1", 2)
        assert (await first.read()).HasField("refill_due")
        second = trainer.prepare_stream(1)
        kinds = {(await second.read()).WhichOneof("event"), (await second.read()).WhichOneof("event")}
        assert kinds == {"progress", "refill_due"}
        await w.buffer.set_depth(8)
        older, newer = await asyncio.gather(rest_of(first), rest_of(second))
        assert "refill_due" not in {event.WhichOneof("event") for event in older}
        assert older[-1] == newer[-1]
        assert w.moves().count("Reclaim") == 1


async def test_a_wait_ends_with_its_last_caller_and_a_repeat_begins_anew() -> None:
    """A wait that nobody hears would be shown refills that nobody adds."""
    async with world() as w:
        trainer = await waiting_trainer(w)
        stream = trainer.prepare_stream(1)
        await stream.read()
        stream.cancel()
        for _ in range(3):
            again = trainer.prepare_stream(1)
            assert (await again.read()).HasField("progress")
            again.cancel()
        last = trainer.prepare_stream(1)
        await last.read()
        await w.buffer.set_depth(8)
        assert (await rest_of(last))[-1].done.reclaimed


async def test_a_reclaim_under_way_goes_on_when_its_caller_is_gone() -> None:
    """A trainer that loses its connection in the middle of a reclaim must find its GPUs back."""
    async with world() as w:
        trainer = await waiting_trainer(w)
        gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
        await w.buffer.set_depth(8)
        stream = trainer.prepare_stream(1)
        reading = asyncio.ensure_future(rest_of(stream))
        await w.engine.script.arrived["Reclaim"].wait()
        stream.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        again = asyncio.ensure_future(trainer.prepare(1))
        await asyncio.sleep(0)
        gate.set()
        done = await again
        assert done.reclaimed
        assert w.moves().count("Reclaim") == 1


async def test_a_buffer_that_restarts_is_waited_for_with_the_same_cursor() -> None:
    """A restart of the buffer in the longest wait of a step must not end the step."""
    async with world(peer_attempts=50) as w:
        trainer = await waiting_trainer(w)
        stream = trainer.prepare_stream(1, cursor=2)
        await stream.read()
        target = w.buffer_host.target
        await w.buffer_host.stop(0)
        async with host_buffer(w.buffer, listen=target):
            await w.buffer.set_depth(8)
            assert (await rest_of(stream))[-1].done.reclaimed
        assert {request.cursor for request in w.buffer.waits} == {2}


async def test_a_buffer_that_stays_away_ends_the_wait_unavailable_with_nothing_changed() -> None:
    """The trainer decides how long it wants to wait for a dead buffer, not we."""
    async with world(peer_attempts=2) as w:
        trainer = await waiting_trainer(w)
        w.buffer.script.failures["WaitForSampleable"] = [unavailable("DRAINING", "stopping")] * 2
        error = await error_of(rest_of(trainer.prepare_stream(1)))
        assert error.code is Code.UNAVAILABLE
        await w.buffer.set_depth(8)
        assert (await trainer.prepare(1)).reclaimed


async def test_draining_ends_parked_calls() -> None:
    """A scheduler that is stopped must not wait for a threshold that comes in an hour."""
    async with world() as w:
        trainer = await waiting_trainer(w)
        stream = trainer.prepare_stream(1)
        await stream.read()
        stopping = asyncio.ensure_future(w.host.stop())
        error = await error_of(rest_of(stream))
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert await stopping


# -------------------------------------------------------------------------------------------- scripted policies


class Scripted:
    """Lends when a mini-batch is missing, takes back at a depth it does not name before."""

    name = "verl"

    def __init__(self, config: PolicyConfig) -> None:
        self.depth = 0
        self.asked: list[tuple[Point, float]] = []
        self.recheck: float | None = None
        self.back_at = 5
        self.back_after: float | None = None
        self.lends = True

    def observe(self, event: Event) -> None:
        if isinstance(event, DepthObserved):
            self.depth = event.sampleable

    def decide(self, point: Point, now: float) -> Decision:
        self.asked.append((point, now))
        if point is Point.SAMPLE_BEGIN and self.lends and self.depth < 4:
            return Decision(action=Action.LEND, reason="starved")
        late = self.back_after is not None and now >= self.back_after
        if point is Point.STEP_BEGIN or (point is Point.WAITING and (self.depth >= self.back_at or late)):
            return Decision(action=Action.RECLAIM, reason="enough")
        return Decision(action=Action.KEEP, reason="wait", recheck_at=self.recheck)


class Factory:
    """Hands out one scripted policy, which the test holds too."""

    def __init__(self) -> None:
        self.policy: Scripted | None = None

    def __call__(self, name: str, config: PolicyConfig) -> Policy:
        policies.create(name, config)
        self.policy = self.policy or Scripted(config)
        return self.policy

    @property
    def made(self) -> Scripted:
        assert self.policy is not None
        return self.policy


async def starving_trainer(w: World, *, can_reinstall: bool = True) -> Trainer:
    trainer = await w.trainer(run_config(can_reinstall=can_reinstall))
    await trainer.begin(1)
    await trainer.prepare(1)
    w.moves()
    return trainer


async def test_a_lend_within_a_step_installs_the_last_published_weights_and_ends_in_proceed() -> None:
    """The trainer holds half-stepped weights then; engines must get those of the step before."""
    factory = Factory()
    async with world(create=factory) as w:
        trainer = await starving_trainer(w)
        done = await trainer.begin_sample(1, 0)
        assert done.lend.kind == events_pb2.LEND_KIND_WITHIN_STEP
        assert done.lend.weight_version == 0
        assert not done.lend.update_standalone
        await trainer.complete(done.lend)
        stream = trainer.sample_stream(1, 0, attempt=1)
        assert (await stream.read()).progress.target == 16
        await w.buffer.set_depth(5)
        done = (await rest_of(stream))[-1].done
        assert done.proceed.sampleable == 5
        assert done.proceed.outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        assert done.proceed.HasField("reclaim")
        assert w.moves() == ["BeginLend", "FinishLend", "Reclaim"]
        await trainer.end_sample(1, 0, wait=1.0)
        events = [event.lend_done for event in await trainer.events() if event.HasField("lend_done")]
        assert [lend.counted for lend in events] == [False, True]


async def test_a_lend_within_a_step_that_is_abandoned_proceeds() -> None:
    """Asking the same policy again would give the same lend again, for ever."""
    async with world(create=Factory()) as w:
        trainer = await starving_trainer(w)
        done = await trainer.begin_sample(1, 0)
        await trainer.abandon(done.lend)
        done = await trainer.begin_sample(1, 0, attempt=1)
        assert done.HasField("proceed")
        assert w.moves() == ["BeginLend", "AbortLend"]


async def test_a_trainer_that_cannot_reinstall_is_never_lent_within_a_step() -> None:
    """Its engines would generate with half-stepped weights."""
    async with world(create=Factory()) as w:
        trainer = await starving_trainer(w, can_reinstall=False)
        assert (await trainer.begin_sample(1, 0)).HasField("proceed")
        assert w.moves() == []


async def test_a_lend_within_a_step_that_does_not_begin_proceeds() -> None:
    """An engine that fails to lend must not keep the trainer from its mini-batch."""
    async with world(create=Factory()) as w:
        trainer = await starving_trainer(w)
        w.engine.script.failures["BeginLend"] = [unavailable("BROKEN", "no")] * 3
        assert (await trainer.begin_sample(1, 0)).HasField("proceed")
        assert w.moves() == ["BeginLend"] * 3 + ["AbortLend"]


async def test_a_lend_within_a_step_that_can_neither_begin_nor_be_undone_keeps_the_trainer_waiting() -> None:
    """PROCEED would let the trainer train on memory that an engine still holds."""
    async with world(create=Factory()) as w:
        trainer = await starving_trainer(w)
        w.engine.script.failures["BeginLend"] = [failed_precondition("BROKEN", "no")]
        w.engine.stubborn = {"hybrid-0"}
        assert (await error_of(rest_of(trainer.sample_stream(1, 0)))).reason == "ABORT_LEND_FAILED"
        assert (await trainer.run()).mode == events_pb2.MODE_RECLAIMING
        w.engine.stubborn.clear()
        assert (await trainer.begin_sample(1, 0)).HasField("proceed")
        assert (await trainer.run()).mode == events_pb2.MODE_TRAINER
        names = [event.WhichOneof("event") for event in await trainer.events()]
        assert names.count("mini_batch_began") == names.count("starvation_began") == 1


async def test_a_hybrid_that_falls_ill_while_the_trainer_trains_does_not_stop_its_step() -> None:
    """It was confirmed free when the step began; a reclaim that it cannot answer would end the training."""
    async with world(create=Factory()) as w:
        trainer = await starving_trainer(w)
        w.engine.replicas["hybrid-0"].confirmed_free = False
        w.engine.stubborn = {"hybrid-0"}
        await w.engine.wake()
        while (await trainer.run()).mode != events_pb2.MODE_RECLAIMING:
            pass
        assert (await trainer.begin_sample(1, 0)).HasField("proceed")
        assert w.moves() == []


async def test_a_wait_within_a_step_that_times_out_is_taken_up_with_the_next_attempt() -> None:
    """Deadlines are a matter of transport, not of who has the GPUs."""
    async with world(create=Factory()) as w:
        trainer = await starving_trainer(w)
        done = await trainer.begin_sample(1, 0)
        await trainer.complete(done.lend)
        done = await trainer.begin_sample(1, 0, attempt=1, max_wait=0.05)
        assert done.timed_out.reason
        await w.buffer.set_depth(5)
        assert (await trainer.begin_sample(1, 0, attempt=2)).proceed.sampleable == 5


async def test_a_policy_is_asked_again_when_it_wanted_to_be() -> None:
    """A predicting policy decides by time, too; arrivals alone would wake it too late."""
    factory = Factory()
    async with world(create=factory) as w:
        trainer = await starving_trainer(w)
        done = await trainer.begin_sample(1, 0)
        await trainer.complete(done.lend)
        now = (await trainer.events())[-1].at
        factory.made.recheck = factory.made.back_after = now + 0.2
        done = await trainer.begin_sample(1, 0, attempt=1)
        assert done.proceed.sampleable == 0
        assert done.decision.action == events_pb2.DECISION_ACTION_RECLAIM
        waits = [at for point, at in factory.made.asked if point is Point.WAITING]
        assert waits[-1] >= now + 0.2


async def test_a_recheck_time_that_is_past_does_not_spin() -> None:
    """A policy that names a past time would otherwise be asked without a pause, on a full core."""
    factory = Factory()
    async with world(create=factory) as w:
        trainer = await starving_trainer(w)
        done = await trainer.begin_sample(1, 0)
        await trainer.complete(done.lend)
        factory.made.recheck = 0.0
        stream = trainer.sample_stream(1, 0, attempt=1)
        await stream.read()
        await w.buffer.set_depth(2)
        await stream.read()
        assert len([point for point, _ in factory.made.asked if point is Point.WAITING]) <= 3
        await w.buffer.set_depth(6)
        assert (await rest_of(stream))[-1].done.HasField("proceed")


async def test_a_recheck_that_comes_due_under_a_hold_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a hold stands the policy is not asked, so the time it named must not come due again and again."""
    factory = Factory()
    turns = 0
    turn = Wait._next

    async def counted(self: Wait, upcoming: Any) -> None:
        nonlocal turns
        turns += 1
        await turn(self, upcoming)

    monkeypatch.setattr(Wait, "_next", counted)
    clock = ManualClock()
    async with world(create=factory, clock=clock) as w:
        trainer = await starving_trainer(w)
        done = await trainer.begin_sample(1, 0)
        await trainer.complete(done.lend)
        factory.made.recheck = (await trainer.events())[-1].at + 10.0
        stream = trainer.sample_stream(1, 0, attempt=1)
        await stream.read()
        await w.buffer.set_depth(2, held="old")
        assert (await stream.read()).progress.depth.HasField("hold")
        before = turns
        await clock.advance(11.0)
        assert turns <= before + 2
        await w.buffer.set_depth(6)
        assert (await rest_of(stream))[-1].done.HasField("proceed")


# ------------------------------------------------------------------------------------------------------------ darkness


async def all_are(w: World, trainer: Trainer, *, alive: bool) -> None:
    """Let all replicas die, or be back and serve; returns when the scheduler knows."""
    for replica in w.engine.replicas.values():
        replica.health = engine_pb2.REPLICA_HEALTH_HEALTHY if alive else engine_pb2.REPLICA_HEALTH_DEAD
        replica.route = engine_pb2.ROUTE_STATE_SERVING if alive else engine_pb2.ROUTE_STATE_OUT
    await w.engine.wake()
    async with asyncio.timeout(10):
        while True:
            seen = [event.topology_changed for event in await trainer.events() if event.HasField("topology_changed")]
            if seen and bool(seen[-1].standalone_replicas) == alive:
                return


async def test_lent_gpus_come_back_when_nobody_serves_any_more() -> None:
    """All replicas were restarted while the GPUs were lent: none has weights, and the trainer alone can bring some."""
    clock = ManualClock()
    async with world(clock=clock, dark_after_s=10.0) as w:
        trainer = await waiting_trainer(w)
        stream = trainer.prepare_stream(1)
        await stream.read()
        await all_are(w, trainer, alive=False)
        await clock.advance(9.0)
        assert w.moves()[-1] == "FinishLend", "they may be back in a moment"
        await clock.advance(2.0)
        done = (await rest_of(stream))[-1].done
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_EXHAUSTED
        assert done.reclaimed
        assert "no replica serves" in done.reason
        assert (await trainer.begin_sample(1, 0)).HasField("proceed")


async def test_gpus_lent_within_a_step_come_back_when_nobody_serves_any_more() -> None:
    """The same wait, from BeginSample."""
    clock = ManualClock()
    async with world(clock=clock, create=Factory(), dark_after_s=10.0) as w:
        trainer = await starving_trainer(w)
        await trainer.complete((await trainer.begin_sample(1, 0)).lend)
        stream = trainer.sample_stream(1, 0, attempt=1)
        await stream.read()
        await all_are(w, trainer, alive=False)
        await clock.advance(11.0)
        proceed = (await rest_of(stream))[-1].done.proceed
        assert proceed.outcome == buffer_pb2.WAIT_OUTCOME_EXHAUSTED
        assert w.moves()[-1] == "Reclaim"


async def test_replicas_that_are_back_in_time_keep_the_gpus_lent() -> None:
    """A controller that is restarted has every route out for a moment; a reclaim for that would cost a step's lend."""
    clock = ManualClock()
    async with world(clock=clock, dark_after_s=10.0) as w:
        trainer = await waiting_trainer(w)
        stream = trainer.prepare_stream(1)
        await stream.read()
        await all_are(w, trainer, alive=False)
        await clock.advance(9.0)
        await all_are(w, trainer, alive=True)
        await clock.advance(60.0)
        await w.buffer.set_depth(8)
        done = (await rest_of(stream))[-1].done
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED


async def test_replicas_that_are_back_as_the_gpus_are_asked_back_change_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They came back while the wait read its last cursor: it then answered what the policy had not decided, as if the
    threshold were reached, or failed where the policy had not been asked at all."""
    cursor_now = BufferPeer.cursor_now
    clock = ManualClock()
    async with world(clock=clock, dark_after_s=10.0) as w:
        trainer = await waiting_trainer(w)

        async def back_meanwhile(self: BufferPeer, epoch: int | None, step: int, cursor: int) -> buffer_pb2.WaitDone:
            if step:
                await all_are(w, trainer, alive=True)
            return await cursor_now(self, epoch, step, cursor)

        monkeypatch.setattr(BufferPeer, "cursor_now", back_meanwhile)
        stream = trainer.prepare_stream(1)
        await stream.read()
        await all_are(w, trainer, alive=False)
        await clock.advance(11.0)
        done = (await rest_of(stream))[-1].done
        assert done.outcome == buffer_pb2.WAIT_OUTCOME_EXHAUSTED
        assert "no replica serves" in done.reason


async def test_the_time_in_which_nothing_was_lent_does_not_count_as_darkness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standalone replicas were away for long before the hybrids were lent. That these serve was not told yet as the
    wait began, and they were taken back at once."""
    clock = ManualClock()
    async with world(clock=clock, dark_after_s=10.0) as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch, opened.run.run_id)
        await all_are(w, trainer, alive=False)
        await clock.advance(60.0)
        told = w.engine.wake

        async def late() -> None:
            """The news are still under way."""

        monkeypatch.setattr(w.engine, "wake", late)
        await trainer.complete(opened.lend)
        await trainer.begin(1)
        stream = trainer.prepare_stream(1)
        await stream.read()
        await clock.advance(1.0)
        monkeypatch.setattr(w.engine, "wake", told)
        await w.engine.wake()
        await all_are(w, trainer, alive=True)
        await clock.advance(60.0)
        await w.buffer.set_depth(8)
        assert (await rest_of(stream))[-1].done.outcome == buffer_pb2.WAIT_OUTCOME_REACHED
