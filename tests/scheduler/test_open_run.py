"""Opening, taking over, closing: epochs, leases and whose GPUs they are."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from services.runtime.clock import ManualClock
from services.runtime.errors import Code, failed_precondition, unavailable
from services.runtime.statuses import from_rpc_error
from services.scheduler.buffer_peer import BufferPeer
from services.scheduler.observer import Observer
from services.scheduler.service import SchedulerService
from tests.scheduler.fakes import FakeEngine, host_engine
from tests.scheduler.world import Trainer, World, error_of, rest_of, run_config, wall, world
from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb

KEEP = pb.Resume(keep_live=True)


async def test_the_epoch_is_above_the_highest_that_any_of_the_three_knows() -> None:
    """One that is not would leave an older trainer with rights at one of them."""
    for buffer, engine in ((4, 0), (0, 7), (3, 5)):
        async with world() as w:
            w.buffer.runs["run"].epoch = buffer
            w.engine.epoch = engine
            opened = await w.open()
            assert opened.epoch == max(buffer, engine) + 1
            assert w.buffer.runs["run"].epoch == w.engine.epoch == opened.epoch


async def test_a_repeat_with_the_same_request_id_gets_the_same_epoch() -> None:
    """A lost reply must not fence the trainer off from itself."""
    async with world() as w:
        first, second = await asyncio.gather(w.open(request_id="a"), w.open(request_id="a"))
        assert (first.epoch, first.lend.lend_id) == (second.epoch, second.lend.lend_id)
        assert await w.open(request_id="a") == first
        error = await error_of(w.open(run_config(total_training_steps=11), request_id="a"))
        assert error.reason == "REQUEST_ID_REUSED"


async def test_a_dropped_open_run_is_finished_and_its_repeat_gets_the_answer() -> None:
    """Half an opening would leave an epoch that nobody holds."""
    async with world() as w:
        gate = w.engine.script.gates["BeginLend"] = asyncio.Event()
        call = w.stub.OpenRun(w.open_request(request_id="a"))
        waiting = asyncio.ensure_future(asyncio.wait_for(call, 30))
        await w.engine.script.arrived["BeginLend"].wait()
        call.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        again = asyncio.ensure_future(w.open(request_id="a"))
        await asyncio.sleep(0)
        gate.set()
        assert (await again).epoch == 1


async def test_a_validation_partition_is_refused_before_anybody_is_fenced_off() -> None:
    """Nothing in it is evicted or refilled, so a trainer of it would wait for ever."""
    async with world() as w:
        kind = buffer_pb2.PARTITION_KIND_VALIDATION
        w.buffer.runs["run"].config.partitions.add(name="val", kind=kind)
        error = await error_of(w.open(run_config(partition="val")))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "VALIDATION_PARTITION")
        assert error.metadata["field"] == "config.partition"
        assert w.buffer.runs["run"].epoch == w.engine.epoch == 0


async def test_a_second_trainer_waits_for_the_lease_or_takes_over() -> None:
    """Two trainers of one run would each train on half of its groups."""
    async with world() as w:
        await w.trainer(run_config(trainer_lease=wall(60)))
        error = await error_of(w.open(resume=KEEP))
        assert error.reason == "TRAINER_ALIVE"
        assert 0 < float(error.metadata["lease_left"].removesuffix("s")) <= 60
        assert (await w.open(resume=KEEP, take_over=True)).epoch == 2


async def test_a_lost_lease_permits_a_newer_epoch_and_moves_no_gpu() -> None:
    """A trainer in a debugger must find its GPUs where it left them."""
    clock = ManualClock()
    async with world(clock=clock) as w:
        trainer = await w.trainer(run_config(trainer_lease=wall(30)))
        w.moves()
        await clock.advance(31)
        assert (await trainer.run()).lease.ToNanoseconds() == 0
        assert (await trainer.run()).mode == events_pb2.MODE_ROLLOUT
        assert w.moves() == []
        assert (await trainer.heartbeat()).lease.ToNanoseconds() > 0, "late, and nobody came in between"
        await clock.advance(31)
        assert (await w.open(resume=KEEP)).epoch == 2
        assert (await error_of(trainer.heartbeat())).reason == "STALE_EPOCH"


async def test_a_parked_call_keeps_the_lease() -> None:
    """A trainer that waits for the threshold lives, whatever its heartbeats do."""
    clock = ManualClock()
    async with world(clock=clock) as w:
        trainer = await w.trainer(run_config(trainer_lease=wall(30)))
        await trainer.begin(1)
        stream = trainer.prepare_stream(1)
        await stream.read()
        await clock.advance(31)
        assert (await error_of(w.open(resume=KEEP))).reason == "TRAINER_ALIVE"
        stream.cancel()


async def test_heartbeats_renew_the_sample_leases_of_the_epoch() -> None:
    """A long optimiser step must not let the groups it trains on go back."""
    async with world(time_scale=0.01) as w:
        trainer = await w.trainer()
        failures = w.buffer.script.failures["RenewEpoch"]
        failures.append(unavailable("DRAINING", "stopping"))
        async with asyncio.timeout(20):
            # One renewal is under way at a time, and they have a pace, so most heartbeats begin none.
            while failures or not w.buffer.renewed:
                assert (await trainer.heartbeat()).lease.seconds > 0, "a buffer that restarts is no trainer's fault"
            assert set(w.buffer.renewed) == {trainer.epoch}
            failures.append(failed_precondition("STALE_EPOCH", "a newer trainer"))
            reason = ""
            while not reason:
                try:
                    await trainer.heartbeat()
                except grpc.aio.AioRpcError as error:
                    reason = from_rpc_error(error).reason
        assert reason == "STALE_EPOCH"


async def test_a_renewal_that_fails_for_no_reason_of_ours_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases of a trainer ran out, its groups went to others, and no line of any log said why."""

    async def broken(self: BufferPeer, epoch: int) -> None:
        raise RuntimeError("a slip of the pen")

    monkeypatch.setattr(BufferPeer, "renew_epoch", broken)
    async with world(time_scale=0.01) as w:
        trainer = await w.trainer()

        async def beat() -> None:
            while True:
                await trainer.heartbeat()

        async with asyncio.timeout(20):
            assert (await error_of(beat())).code is Code.INTERNAL


def connections(w: World) -> set[str]:
    """Targets to which the scheduler has a connection."""
    service = w.host.service
    assert isinstance(service, SchedulerService)
    return set(service._links._links)


async def test_only_open_runs_have_connections() -> None:
    """Each OpenRun with a slip in a target left one behind that tried to connect for ever."""
    async with world() as w:
        ours = {w.buffer_host.target, w.engine_host.target}
        trainer = await w.trainer()
        for number in range(1, 4):
            slip = w.open(run_id=f"slip-{number}", engine_target=f"127.0.0.1:{number}")
            assert (await error_of(slip)).reason in ("ENGINE_UNREACHABLE", "RUN_NOT_FOUND")
            assert connections(w) == ours
        gate = w.buffer.script.gates["GetRun"] = asyncio.Event()
        opening = asyncio.ensure_future(w.open(run_id="slow", buffer_target=w.buffer_host.target))
        await w.buffer.script.arrived["GetRun"].wait()
        await w.stub.CloseRun(pb.CloseRunRequest(run_id="run", epoch=trainer.epoch, reason="done"))
        assert connections(w) == ours, "another run is being opened over them"
        gate.set()
        await error_of(opening)
        assert connections(w) == set()
        await w.trainer(resume=KEEP)
        assert connections(w) == ours


async def test_a_heartbeat_does_not_wait_for_the_buffer() -> None:
    """A buffer that hangs would make a trainer that lives look dead."""
    async with world() as w:
        trainer = await w.trainer()
        gate = w.buffer.script.gates["RenewEpoch"] = asyncio.Event()
        for _ in range(3):
            assert (await trainer.heartbeat()).lease.seconds > 0
        await w.buffer.script.arrived["RenewEpoch"].wait()
        gate.set()


async def test_calls_of_an_older_trainer_are_refused_and_change_nothing() -> None:
    """A trainer that comes back from a network partition must not move its successor's GPUs."""
    async with world() as w:
        old = await w.trainer()
        await old.begin(1)
        stream = old.prepare_stream(1)
        await stream.read()
        opened = await w.open(resume=KEEP, take_over=True)
        assert (await error_of(rest_of(stream))).reason == "STALE_EPOCH"
        w.moves()
        for call in (old.begin(1), old.end(1), old.heartbeat(), old.save(0), old.complete(opened.lend)):
            error = await error_of(call)
            assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "STALE_EPOCH")
        ahead = Trainer(w.stub, opened.epoch + 1)
        assert (await error_of(ahead.begin(1))).reason == "UNKNOWN_EPOCH"
        assert w.moves() == []


async def test_a_take_over_waits_for_the_transition_under_way() -> None:
    """Two trainers' transitions at once would leave replicas half lent."""
    async with world() as w:
        old = await w.trainer()
        await w.buffer.set_depth(8)
        gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
        beginning = asyncio.ensure_future(old.begin(1))
        await w.engine.script.arrived["Reclaim"].wait()
        taking = asyncio.ensure_future(w.open(resume=KEEP, take_over=True))
        done, _ = await asyncio.wait([taking], timeout=0.1)
        assert not done
        gate.set()
        assert (await beginning).reclaimed
        assert (await taking).epoch == 2


async def test_a_take_over_takes_lent_gpus_back_first() -> None:
    """The new trainer loads its model onto GPUs that still generate for the old one."""
    async with world() as w:
        await w.trainer()
        w.moves()
        opened = await w.open(resume=KEEP, take_over=True)
        assert w.moves() == ["Reclaim", "BeginLend"]
        assert opened.run.mode == events_pb2.MODE_LENDING


async def test_a_take_over_that_cannot_free_the_gpus_fails_and_holds_no_lease() -> None:
    """Repeating it must be possible without waiting for a lease that nobody has."""
    async with world() as w:
        trainer = await w.trainer(run_config(trainer_lease=wall(0.05)))
        w.engine.stubborn.add("hybrid-0")
        error = await error_of(w.open(resume=KEEP, take_over=True))
        assert (error.code, error.reason) == (Code.ABORTED, "RECLAIM_FAILED")
        assert error.metadata["operation_id"] == "op-reclaim"
        assert (await trainer.run()).epoch == 1
        w.engine.stubborn.clear()
        assert (await w.open(resume=KEEP, take_over=True)).epoch == 3


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train_batch_size": 15}, "config.train_batch_size"),
        ({"num_warmup_batches": float("nan")}, "config.num_warmup_batches"),
        ({"policy": "vrel"}, "config.policy"),
        ({"switch": pb.SwitchConfig(switch_threshold_ratio=float("nan"))}, "config.switch.switch_threshold_ratio"),
        ({"switch": pb.SwitchConfig(switch_cost_window_size=0)}, "config.switch.switch_cost_window_size"),
        ({"idle_tolerance": wall(-1)}, "config.idle_tolerance"),
        ({"trainer_lease": wall(0)}, "config.trainer_lease"),
        ({"engine_timeout": wall(0)}, "config.engine_timeout"),
        ({"group_size": 0}, "config.group_size"),
    ],
)
async def test_a_wrong_configuration_is_refused_by_name_and_opens_nothing(changes: dict[str, Any], field: str) -> None:
    """A refused opening that had already fenced off the running trainer would stop a healthy job."""
    async with world() as w:
        error = await error_of(w.open(run_config(**changes)))
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, field)
        assert w.buffer.runs["run"].epoch == w.engine.epoch == 0


@pytest.mark.parametrize("field", ["run_id", "buffer_target", "engine_target"])
async def test_missing_names_are_refused(field: str) -> None:
    """An empty target would be dialled as some address of the machine."""
    async with world() as w:
        error = await error_of(w.stub.OpenRun(w.open_request(None, **{field: ""})))
        assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT, field)


async def test_a_run_that_names_no_policy_looks_ahead() -> None:
    """What is best in the simulator has to be what somebody gets who does not know of policies."""
    async with world() as w:
        await w.open(run_config(policy=""))
        run = await w.stub.GetRun(pb.GetRunRequest(run_id="run"))
        assert run.run.config.policy == "jit"


async def test_a_negative_resume_step_is_refused() -> None:
    """Step -1 would make the next step 0."""
    async with world() as w:
        error = await error_of(w.open(resume=pb.Resume(resume_step=-1, keep_live=True)))
        assert error.metadata["field"] == "resume.resume_step"


async def test_an_unknown_run_is_refused_by_the_buffer_and_here() -> None:
    """Groups of a run that does not exist would never come."""
    async with world() as w:
        assert (await error_of(w.open(run_id="nobody"))).reason == "RUN_NOT_FOUND"
        error = await error_of(w.stub.GetRun(pb.GetRunRequest(run_id="nobody")))
        assert (error.code, error.reason) == (Code.NOT_FOUND, "RUN_NOT_FOUND")
        assert (await error_of(w.stub.BeginStep(pb.BeginStepRequest(run_id="nobody")))).reason == "RUN_NOT_FOUND"


async def test_peers_that_cannot_be_reached_are_named() -> None:
    """ "UNAVAILABLE" alone does not say which of three services is down."""
    async with world(peer_timeout_s=2.0) as w:
        error = await error_of(w.open(buffer_target="127.0.0.1:1"))
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "BUFFER_UNREACHABLE")
        assert error.metadata["target"] == "127.0.0.1:1"
        error = await error_of(w.open(engine_target="127.0.0.1:1"))
        assert error.reason == "ENGINE_UNREACHABLE"


async def test_a_buffer_that_cannot_wait_is_refused_with_switching_on_only() -> None:
    """It would hand the GPUs back before the step has anything to train on, which is worse than not switching."""
    async with world() as w:
        w.buffer.unimplemented.add("WaitForSampleable")
        error = await error_of(w.open())
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "BUFFER_CANNOT_WAIT")
        assert (await w.open(run_config(on=False))).cursor == 0


async def test_a_controller_of_another_run_is_refused() -> None:
    """Its replicas are not ours to move."""
    async with world() as w:
        w.engine.run_id = "other"
        assert (await error_of(w.open())).reason == "RUN_BOUND"


async def second_engine(w: World, *gpus: str) -> FakeEngine:
    w.buffer.add_run("two")
    engine = FakeEngine(w.journal, "two")  # type: ignore[abstract]
    for gpu in gpus:
        engine.add(f"other-{gpu}", gpu=gpu)
    return engine


async def test_a_gpu_that_another_open_run_holds_is_refused() -> None:
    """Two runs that lend one GPU would wake an engine in the other's training memory."""
    async with world() as w:
        first = await w.trainer()
        engine = await second_engine(w, "gpu-hybrid-1")
        async with host_engine(engine) as host:
            error = await error_of(w.open(run_id="two", engine_target=host.target))
            assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "GPU_HELD")
            assert error.metadata["held_by"] == "run"
            assert error.metadata["gpu_uuid"] == "gpu-hybrid-1"
            assert engine.epoch == 0, "nothing was opened"
            await w.stub.CloseRun(pb.CloseRunRequest(run_id="run", epoch=first.epoch))
            assert (await w.open(run_id="two", engine_target=host.target)).epoch == 1


async def test_devices_named_in_the_configuration_are_held_before_any_replica_registers() -> None:
    """Hybrids register after OpenRun; the clash must show before the model is loaded."""
    async with world(hybrids=0) as w:
        devices = [engine_pb2.Gpu(node="n0", uuid="g7")]
        await w.open(run_config(hybrid_devices=devices))
        engine = await second_engine(w)
        async with host_engine(engine) as host:
            config = run_config(hybrid_devices=devices)
            error = await error_of(w.open(config, run_id="two", engine_target=host.target))
            assert error.reason == "GPU_HELD"


async def test_a_clash_that_shows_late_is_refused_at_complete_lend() -> None:
    """Nothing of the other run may be touched, whenever the replica registers."""
    async with world() as w:
        await w.trainer()
        engine = await second_engine(w)
        async with host_engine(engine) as host:
            opened = await w.open(run_id="two", engine_target=host.target)
            engine.add("late", gpu="gpu-hybrid-0")
            trainer = Trainer(w.stub, opened.epoch, "two")
            assert (await error_of(trainer.complete(opened.lend))).reason == "GPU_HELD"
            assert (await trainer.run()).mode == events_pb2.MODE_LENDING


async def test_without_registered_hybrids_a_lend_cannot_be_completed() -> None:
    """ "Nothing serves" must not be told as success."""
    async with world(hybrids=0) as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        assert (await error_of(trainer.complete(opened.lend))).reason == "NO_HYBRIDS"
        await trainer.abandon(opened.lend)
        await w.buffer.set_depth(0)
        await trainer.begin(1)
        await trainer.prepare(1)
        for mini_batch in range(4):
            await trainer.sample(1, mini_batch)
        ended = await trainer.end(1)
        assert not ended.HasField("lend")
        assert "no hybrid replica" in ended.lend_failure
        assert not (await trainer.begin_validation(1)).HasField("lend")


async def test_a_run_without_hybrid_gpus_trains_and_never_touches_the_engine() -> None:
    """`hybrid_engine=False` in verl: rollout is served by the standalone pool alone."""
    async with world(hybrids=0) as w:
        opened = await w.open(run_config(hybrid_gpus=0))
        assert not opened.HasField("lend")
        assert opened.run.mode == events_pb2.MODE_TRAINER
        trainer = Trainer(w.stub, opened.epoch)
        await trainer.step(1)
        assert (await trainer.end(1)).metrics == {}
        assert w.moves() == []


async def test_closing_a_run_ends_its_waits_and_takes_lent_gpus_back() -> None:
    """A closed run that still held GPUs would lock the next one out; one that left engines awake, train over them."""
    async with world() as w:
        trainer = await w.trainer()
        await trainer.begin(1)
        stream = trainer.prepare_stream(1)
        await stream.read()
        w.moves()
        close = pb.CloseRunRequest(run_id="run", epoch=trainer.epoch, reason="finished")
        await w.stub.CloseRun(close)
        assert (await error_of(rest_of(stream))).reason == "RUN_CLOSED"
        await w.stub.CloseRun(close)
        assert w.moves() == ["Reclaim"]
        assert w.engine.all_free
        run = await trainer.run()
        assert not run.open
        assert list(run.expected_calls) == []
        assert (await error_of(trainer.begin(1))).reason == "RUN_CLOSED"
        closed = [event.run_closed for event in await trainer.events() if event.HasField("run_closed")]
        assert [event.reason for event in closed] == ["finished"]
        error = await error_of(w.open())
        assert error.reason != "TRAINER_ALIVE"


def closing(trainer: Trainer, **changes: Any) -> pb.CloseRunRequest:
    return pb.CloseRunRequest(run_id=trainer.run_id, epoch=trainer.epoch, **changes)


async def test_a_run_holds_its_gpus_until_its_engines_are_confirmed_free() -> None:
    """Another run that claimed a GPU from under an engine that is awake would be its second owner."""
    async with world() as w:
        trainer = await w.trainer()
        engine = await second_engine(w, "gpu-hybrid-1")
        async with host_engine(engine) as host:
            w.engine.stubborn.add("hybrid-1")
            error = await error_of(w.stub.CloseRun(closing(trainer)))
            assert (error.code, error.reason) == (Code.ABORTED, "RECLAIM_FAILED")
            assert (await trainer.run()).open
            assert (await error_of(w.open(run_id="two", engine_target=host.target))).reason == "GPU_HELD"
            w.engine.stubborn.clear()
            await w.stub.CloseRun(closing(trainer))
            assert w.engine.all_free
            assert (await w.open(run_id="two", engine_target=host.target)).epoch == 1


async def test_a_run_that_could_not_be_closed_may_be_taken_over_and_takes_no_other_call() -> None:
    """A trainer that says it has ended must not be lent GPUs again, and its successor must not be locked out."""
    async with world() as w:
        trainer = await w.trainer()
        w.engine.stubborn.add("hybrid-1")
        assert (await error_of(w.stub.CloseRun(closing(trainer)))).reason == "RECLAIM_FAILED"
        assert (await error_of(trainer.begin(1))).reason == "RUN_CLOSED"
        w.engine.stubborn.clear()
        successor = await w.trainer(resume=KEEP, take_over=True)
        assert successor.epoch == trainer.epoch + 1
        await w.buffer.set_depth(16)
        assert (await successor.begin(1)).mode == events_pb2.MODE_TRAINER


async def test_closing_undoes_a_lend_that_is_under_way() -> None:
    """Weights that are on their way to an engine whose run is closed would land on the GPU of the next one."""
    async with world() as w:
        opened = await w.open()
        trainer = Trainer(w.stub, opened.epoch)
        w.moves()
        await w.stub.CloseRun(closing(trainer))
        assert w.moves() == ["AbortLend"]
        assert w.engine.all_free


async def test_a_run_whose_engines_are_gone_is_closed_without_them() -> None:
    """A controller that never comes back would keep the GPUs of a dead job from all others for ever."""
    async with world(transition_attempts=1) as w:
        trainer = await w.trainer()
        await w.engine_host.stop()
        error = await error_of(w.stub.CloseRun(closing(trainer)))
        assert (error.reason, error.metadata["cause"]) == ("RECLAIM_FAILED", "ENGINE_UNREACHABLE")
        assert (await trainer.run()).open
        await w.stub.CloseRun(closing(trainer, engines_gone=True))
        assert not (await trainer.run()).open


async def test_a_call_that_comes_while_its_run_is_being_closed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let in, it would begin a wait that nobody ends, and move GPUs that another run may hold by then."""
    closing, go_on = asyncio.Event(), asyncio.Event()
    close = Observer.close

    async def held_up(self: Observer) -> None:
        closing.set()
        await go_on.wait()
        await close(self)

    monkeypatch.setattr(Observer, "close", held_up)
    async with world() as w:
        trainer = await w.trainer()
        await trainer.begin(1)
        request = pb.CloseRunRequest(run_id="run", epoch=trainer.epoch)
        ending = asyncio.ensure_future(w.stub.CloseRun(request))
        await closing.wait()
        error = await error_of(rest_of(trainer.prepare_stream(1)))
        assert error.reason == "RUN_CLOSED"
        go_on.set()
        await ending


async def test_a_closed_run_is_forgotten_after_many_others() -> None:
    """A scheduler that serves for a year must not keep every run it ever had."""
    async with world(hybrids=0) as w:
        for number in range(34):
            name = f"run-{number}"
            w.buffer.add_run(name)
            w.engine.run_id, w.engine.epoch = name, 0
            opened = await w.open(run_config(hybrid_gpus=0), run_id=name)
            await w.stub.CloseRun(pb.CloseRunRequest(run_id=name, epoch=opened.epoch))
        runs = (await w.stub.ListRuns(pb.ListRunsRequest())).runs
        assert len(runs) == 32
        assert "run-0" not in {run.run_id for run in runs}


async def test_a_checkpoint_must_be_known_and_of_the_step_that_the_trainer_names() -> None:
    """A roll-back to another step than the model's would mix two histories."""
    async with world() as w:
        trainer = await w.trainer()
        saved = await trainer.save(0)
        unknown = pb.Resume(resume_step=0, checkpoint_id="other")
        assert (await error_of(w.open(resume=unknown, take_over=True))).reason == "CHECKPOINT_NOT_FOUND"
        wrong = pb.Resume(resume_step=3, checkpoint_id=saved.checkpoint_id)
        error = await error_of(w.open(resume=wrong, take_over=True))
        assert (error.reason, error.metadata["checkpoint_step"]) == ("RESUME_MISMATCH", "0")


async def test_only_the_last_saved_states_are_kept() -> None:
    """Thousands of checkpoints of a long job must not stay in memory."""
    async with world() as w:
        trainer = await w.trainer(run_config(on=False))
        saved = [(await trainer.save(0)).checkpoint_id]
        for step in range(1, 18):
            await trainer.step(step)
            saved.append((await trainer.save(step)).checkpoint_id)
        first = pb.Resume(resume_step=0, checkpoint_id=saved[0])
        assert (await error_of(w.open(resume=first, take_over=True))).reason == "CHECKPOINT_NOT_FOUND"
        last = pb.Resume(resume_step=17, checkpoint_id=saved[-1])
        assert (await w.open(resume=last, take_over=True)).next_step == 18


async def test_update_run_takes_effect_with_the_next_step_and_keeps_what_it_does_not_name() -> None:
    """A ratio that moved within a step would move the threshold that the trainer waits for."""
    async with world() as w:
        trainer = await w.trainer()
        switch = pb.SwitchConfig(switch_threshold_ratio=1.0)
        update = pb.UpdateRunRequest(run_id="run", epoch=trainer.epoch, switch=switch, policy="fixed")
        await w.stub.UpdateRun(update)
        assert (await trainer.run()).config.policy == "verl"
        began = await trainer.begin(1)
        assert began.decision.threshold == 16
        run = await trainer.run()
        assert run.config.policy == "fixed"
        assert run.config.switch.enable_switch
        bad = pb.SwitchConfig(switch_threshold_ratio=2.0)
        error = await error_of(w.stub.UpdateRun(pb.UpdateRunRequest(run_id="run", epoch=trainer.epoch, switch=bad)))
        assert error.metadata["field"] == "config.switch.switch_threshold_ratio"
        request = pb.UpdateRunRequest(run_id="run", epoch=trainer.epoch, policy="nope")
        assert (await error_of(w.stub.UpdateRun(request))).reason == "UNKNOWN_POLICY"


async def test_switching_off_in_a_run_reclaims_at_the_next_step() -> None:
    """An operator who turns the switch off expects the trainer to keep its GPUs from then on."""
    async with world() as w:
        trainer = await w.trainer()
        off = pb.SwitchConfig(enable_switch=False)
        await w.stub.UpdateRun(pb.UpdateRunRequest(run_id="run", epoch=trainer.epoch, switch=off))
        assert (await trainer.begin(1)).reclaimed


async def test_an_opening_that_is_refused_leaves_the_running_trainer_alone() -> None:
    """A second job started by mistake must not end the first one's wait."""
    async with world(peer_timeout_s=1.0) as w:
        trainer = await w.trainer()
        await trainer.begin(1)
        stream = trainer.prepare_stream(1)
        await stream.read()
        w.engine.script.failures["engine.OpenEpoch"].append(unavailable("DRAINING", "stopping"))
        assert (await error_of(w.open(resume=KEEP, take_over=True))).code is Code.UNAVAILABLE
        assert (await error_of(w.open(take_over=True, buffer_target="127.0.0.1:1"))).reason == "BUFFER_UNREACHABLE"
        await w.buffer.set_depth(8)
        assert (await rest_of(stream))[-1].done.reclaimed


async def test_a_predecessor_is_refused_as_soon_as_it_is_fenced_off() -> None:
    """Between the fence and the new epoch its calls would move GPUs that the successor is about to take."""
    async with world() as w:
        old = await w.trainer()
        gate = w.engine.script.gates["Reclaim"] = asyncio.Event()
        opening = asyncio.ensure_future(w.open(resume=KEEP, take_over=True))
        await w.engine.script.arrived["Reclaim"].wait()
        assert (await error_of(old.begin(1))).reason == "STALE_EPOCH"
        gate.set()
        assert (await opening).epoch == 2


async def test_an_opening_that_waits_for_engines_ends_as_the_scheduler_stops() -> None:
    """A rolling restart told the trainer that its GPUs cannot be had, which ended it; asking again was all it took."""
    async with world(reclaim_patience_s=300.0) as w:
        await w.trainer()
        w.engine.script.failures["Reclaim"] = [unavailable("DRAINING", "stopping")] * 1000
        opening = asyncio.ensure_future(error_of(w.open(take_over=True)))
        await w.engine.script.arrived["Reclaim"].wait()
        stopping = asyncio.ensure_future(w.host.stop())
        error = await opening
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert await stopping
