"""The trainer hooks against scripted services: what they call, in which order, and what happens on a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from tests.client.fakes import Asked, FakeService, events, failing, fake, in_turn
from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    Aborted,
    ClientOptions,
    FailedPrecondition,
    NotFound,
    PartialFailure,
    RetryPolicy,
    StaleEpoch,
    Timeouts,
    duration,
    seconds,
)
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import events_pb2, scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, Moved, NotReached, TrainerHooks, TrainerSetup, WeightTarget, resume_from

OPTIONS = ClientOptions(timeouts=Timeouts(call=5, transition=5), retry=RetryPolicy(initial=0.01, maximum=0.02))
LEND = scheduler_pb2.Lend(
    lend_id="lend-1",
    kind=events_pb2.LEND_KIND_STEP_END,
    replica_ids=["h0", "h1"],
    weight_version=1,
    update_standalone=True,
)


def layout(replica_id: str) -> engine_pb2.ReplicaLayout:
    gpu = engine_pb2.Gpu(node="n0", uuid=f"GPU-{replica_id}")
    return engine_pb2.ReplicaLayout(replica_id=replica_id, ranks=[engine_pb2.RankLayout(gpu=gpu)])


def operation(**outcomes: engine_pb2.OutcomeKind.ValueType) -> engine_pb2.Operation:
    listed = [engine_pb2.ReplicaOutcome(replica_id=name, kind=kind) for name, kind in outcomes.items()]
    return engine_pb2.Operation(operation_id="op-1", outcomes=listed)


@dataclass
class World:
    """Three fakes that share one log."""

    buffer: FakeService
    engine: FakeService
    scheduler: FakeService
    log: list[Asked] = field(default_factory=list)

    def setup(self, **changes: Any) -> TrainerSetup:
        settings: dict[str, Any] = {
            "run_id": "r1",
            "config": scheduler_pb2.RunConfig(
                train_batch_size=2, parameter_sync_step=1, mini_batch_size=2, standalone_gpus=2, hybrid_gpus=2
            ),
            "scheduler": self.scheduler.target,
            "buffer": self.buffer.target,
            "engine": self.engine.target,
            "update_weights": lambda target: None,
            "options": OPTIONS,
        }
        return TrainerSetup(**settings | changes)

    def names(self) -> list[str]:
        """All calls in order, heartbeats apart."""
        return [asked.name for asked in self.log if asked.name != "Heartbeat"]

    def requests(self, name: str) -> list[Any]:
        return [asked.request for asked in self.log if asked.name == name]


@pytest.fixture
def world() -> Iterator[World]:
    log: list[Asked] = []
    with contextlib.ExitStack() as stack:
        buffer, engine, scheduler = (stack.enter_context(fake(name, log)) for name in ("buffer", "engine", "scheduler"))
        made = World(buffer, engine, scheduler, log)
        made.scheduler.script["OpenRun"] = lambda request, context: scheduler_pb2.OpenRunResponse(
            epoch=7, next_step=1, warmup_groups=3, time_scale=0.5, cursor=11
        )
        made.scheduler.script["Heartbeat"] = lambda request, context: scheduler_pb2.HeartbeatResponse(
            lease=duration(60)
        )
        made.engine.script["BeginWeightUpdate"] = begin_update
        made.engine.script["CommitWeightUpdate"] = lambda request, context: engine_pb2.CommitWeightUpdateResponse(
            complete=True
        )
        made.scheduler.script["CompleteLend"] = lambda request, context: scheduler_pb2.CompleteLendResponse(
            mode=events_pb2.MODE_ROLLOUT, metrics={"timing_s/switch_to_rollout": 15.0}
        )
        made.scheduler.script["AbandonLend"] = lambda request, context: scheduler_pb2.AbandonLendResponse(
            mode=events_pb2.MODE_TRAINER
        )
        yield made


def begin_update(request: engine_pb2.BeginWeightUpdateRequest, context: Any) -> engine_pb2.BeginWeightUpdateResponse:
    hybrid = list(request.selector.roles) == [engine_pb2.REPLICA_ROLE_HYBRID]
    wave = [layout(name) for name in (list(request.selector.replica_ids) or ["h0"] if hybrid else ["s0", "s1"])]
    return engine_pb2.BeginWeightUpdateResponse(update_id=f"u-{'h' if hybrid else 's'}", wave=wave)


def standalone_answer(
    world: World, health: engine_pb2.ReplicaHealth.ValueType = engine_pb2.REPLICA_HEALTH_HEALTHY
) -> None:
    """The controller lists one standalone replica with this health."""
    spec = engine_pb2.ReplicaSpec(replica_id="s0", role=engine_pb2.REPLICA_ROLE_STANDALONE)
    listed = engine_pb2.ListReplicasResponse(replicas=[engine_pb2.Replica(spec=spec, health=health)])
    world.engine.script["ListReplicas"] = lambda request, context: listed


def lending(world: World, call: str) -> None:
    response = {
        "EndStep": scheduler_pb2.EndStepResponse(lend=LEND, metrics={"separate_async/switch/idle": 1.0}),
        "BeginValidation": scheduler_pb2.BeginValidationResponse(lend=LEND),
    }[call]
    world.scheduler.script[call] = lambda request, context: response


# ------------------------------------------------------------------------------------------------------ a life in order


def test_a_step_calls_everything_in_the_order_of_the_design(world: World) -> None:
    """A hook that calls out of order is refused by the scheduler, or worse, decides on a buffer without the prompts."""
    world.scheduler.script["PrepareStep"] = events(
        scheduler_pb2.PrepareStepResponse(
            done=scheduler_pb2.PrepareStepDone(
                outcome=buffer_pb2.WAIT_OUTCOME_REACHED,
                mode=events_pb2.MODE_TRAINER,
                next_cursor=12,
                metrics={"timing_s/switch_wait": 4.0},
            )
        )
    )
    world.scheduler.script["BeginSample"] = events(
        scheduler_pb2.BeginSampleResponse(
            done=scheduler_pb2.BeginSampleDone(proceed=scheduler_pb2.Proceed(), next_cursor=13)
        )
    )
    world.buffer.script["Sample"] = events(
        buffer_pb2.SampleResponse(
            done=buffer_pb2.SampleDone(outcome=buffer_pb2.WAIT_OUTCOME_REACHED, lease_id="l1", next_cursor=14)
        )
    )
    world.buffer.script["AddGroups"] = lambda request, context: buffer_pb2.AddGroupsResponse(added=len(request.groups))
    lending(world, "EndStep")
    prompts = [buffer_pb2.GroupSpec(group_id=f"g{number}") for number in range(3)]
    config = buffer_pb2.RunConfig()
    with TrainerHooks.open(world.setup(buffer_config=config)) as hooks:
        assert (hooks.epoch, hooks.next_step, hooks.warmup_groups) == (7, 1, 3)
        hooks.on_init_end()
        assert hooks.on_train_begin(prompts) == 3
        hooks.on_step_begin(1)
        hooks.add_groups(1, prompts[:2])
        assert hooks.prepare_step(1) == {"timing_s/switch_wait": 4.0}
        assert hooks.mode == events_pb2.MODE_TRAINER
        hooks.on_sample_begin(1, 0)
        with hooks.sample(1, 0, 2):
            hooks.on_sample_end(1, 0)
        metrics = hooks.on_step_end(1)
        assert hooks.mode == events_pb2.MODE_ROLLOUT
    assert metrics["separate_async/switch/idle"] == 1.0
    assert metrics["timing_s/switch_to_rollout"] == 15.0
    assert metrics["timing_s/update_weights"] > 0
    update = ["BeginWeightUpdate", "CommitWeightUpdate"]
    asleep = ["BeginWeightUpdate", "ReportVacated", "CommitWeightUpdate"]
    assert world.names() == [
        *["CreateRun", "OpenRun", *update, "AddGroups", "BeginStep", "AddGroups", "PrepareStep"],
        *["BeginSample", "Sample", "EndSample", "CommitSample", "ReleasePayload"],
        *["EndStep", *update, *asleep, "CompleteLend", "CloseRun"],
    ]
    # The eviction cursor goes through every wait.
    assert [world.requests(name)[0].cursor for name in ("PrepareStep", "BeginSample", "Sample")] == [11, 12, 13]
    trainer_calls = ("AddGroups", "BeginStep", "PrepareStep", "BeginSample", "Sample", "EndSample", "CommitSample")
    engine_calls = ("BeginWeightUpdate", "ReportVacated", "CommitWeightUpdate")
    for name in (*trainer_calls, *engine_calls, "EndStep", "CompleteLend", "CloseRun"):
        assert {request.epoch for request in world.requests(name)} == {7}, name


async def test_the_asyncio_hooks_are_the_same_hooks(world: World) -> None:
    """The blocking hooks are a shell around these; an asyncio trainer may give coroutine functions."""
    targets: list[str] = []

    async def update_weights(target: WeightTarget) -> Moved:
        targets.extend(target.replica_ids)
        return Moved()

    lending(world, "EndStep")
    async with await AsyncTrainerHooks.open(world.setup(update_weights=update_weights)) as hooks:
        await hooks.on_step_begin(1)
        await hooks.on_step_end(1)
    assert targets == ["s0", "s1", "h0", "h1"]
    assert world.names()[-2:] == ["CompleteLend", "CloseRun"]


def test_after_an_error_the_run_stays_open(world: World) -> None:
    """A trainer that crashed comes back with `resume`; a closed run would have lost its mode and its lends."""
    with pytest.raises(ZeroDivisionError), TrainerHooks.open(world.setup()):
        raise ZeroDivisionError
    assert "CloseRun" not in world.names()


def test_a_run_that_does_not_open_leaves_nothing_behind(world: World) -> None:
    """A heartbeat thread of a run that never opened would go on for ever."""
    world.scheduler.script["OpenRun"] = failing(grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND")
    before = threading.active_count()
    with pytest.raises(NotFound):
        TrainerHooks.open(world.setup())
    assert not [thread for thread in threading.enumerate() if "heartbeat" in thread.name]
    assert threading.active_count() <= before + 64


# -------------------------------------------------------------------------------------------------------------- lending


def test_a_lend_at_the_start_updates_standalone_then_hybrid_replicas(world: World) -> None:
    """Hybrids that got weights first would serve while standalone replicas still hold none."""
    lend = scheduler_pb2.Lend(lend_id="init", weight_version=0, update_standalone=True, allow_older=True)
    world.scheduler.script["OpenRun"] = lambda request, context: scheduler_pb2.OpenRunResponse(
        epoch=7, next_step=1, lend=lend
    )
    targets: list[WeightTarget] = []
    with TrainerHooks.open(world.setup(update_weights=targets.append)) as hooks:
        hooks.on_init_end()
    standalone, hybrid = targets
    assert (standalone.role, standalone.kind) == (engine_pb2.REPLICA_ROLE_STANDALONE, engine_pb2.UPDATE_KIND_AWAKE)
    assert (hybrid.role, hybrid.kind) == (engine_pb2.REPLICA_ROLE_HYBRID, engine_pb2.UPDATE_KIND_ASLEEP)
    assert [target.weight_version for target in targets] == [0, 0]
    assert [gpu.uuid for gpu in hybrid.gpus] == ["GPU-h0"]
    begun = world.requests("BeginWeightUpdate")
    # A lend at the start names no replicas: all hybrids that registered since.
    assert list(begun[1].selector.replica_ids) == []
    assert [request.allow_older for request in begun] == [True, True]


def test_standalone_replicas_may_hold_newer_weights_as_long_as_a_resumed_trainer_runs(world: World) -> None:
    """A replica that missed the first update after a roll-back had all later ones refused."""
    world.scheduler.script["OpenRun"] = lambda request, context: scheduler_pb2.OpenRunResponse(
        epoch=7, next_step=2, allow_older=True
    )
    with TrainerHooks.open(world.setup()) as hooks:
        hooks.on_init_end()
        hooks.on_step_end(2)
    assert [request.allow_older for request in world.requests("BeginWeightUpdate")] == [True, True]


def test_times_are_reported_in_domain_seconds(world: World) -> None:
    """The scheduler compares them with its own; wall seconds under a time scale of 0.5 would halve every cost."""
    lending(world, "EndStep")
    now = [100.0]
    hooks = TrainerHooks.open(world.setup(update_weights=lambda target: now.__setitem__(0, now[0] + 3.0)))
    for client in (hooks.engine, hooks.scheduler):
        client.link.now = lambda: now[0]  # type: ignore[method-assign]
    with hooks:
        metrics = hooks.on_step_end(1)
        world.scheduler.script["EndStep"] = lambda request, context: scheduler_pb2.EndStepResponse()
        hooks.on_step_end(2)
        hooks.on_step_begin(3)
        world.scheduler.script["BeginSample"] = events(
            scheduler_pb2.BeginSampleResponse(done=scheduler_pb2.BeginSampleDone(proceed=scheduler_pb2.Proceed()))
        )
        hooks.on_sample_begin(3, 0)
        now[0] += 2.0
        assert hooks.on_sample_end(3, 0, tokens=5) == 4.0
    (completed,) = world.requests("CompleteLend")
    assert seconds(completed.hybrid_update) == 6.0
    assert seconds(completed.standalone_update) == 6.0
    assert metrics["timing_s/update_weights"] == 6.0
    (begun,) = world.requests("BeginStep")
    assert seconds(begun.standalone_update) == 6.0
    (ended,) = world.requests("EndSample")
    assert (seconds(ended.wait), ended.tokens) == (4.0, 5)


def test_vacated_devices_are_reported_before_the_commit(world: World) -> None:
    """The engine refills KV on the trainer's devices only after the trainer said that it left them."""
    lending(world, "BeginValidation")
    moved = Moved(bytes_free={"GPU-h0": 70 << 30}, failed=["h1"], checksums={"h0": "abc"})
    with TrainerHooks.open(world.setup(update_weights=lambda target: moved)) as hooks:
        hooks.on_validate_begin(1)
        hooks.on_validate_end(1)
    (vacated,) = world.requests("ReportVacated")
    assert [(one.gpu.uuid, one.bytes_free) for one in vacated.vacated] == [("GPU-h0", 70 << 30), ("GPU-h1", 0)]
    acks = {ack.replica_id: (ack.ok, ack.checksum) for ack in world.requests("CommitWeightUpdate")[-1].acks}
    assert acks == {"h0": (True, "abc"), "h1": (False, "")}
    assert world.names()[-2:] == ["EndValidation", "CloseRun"]


def test_a_callback_that_raises_aborts_the_update_and_abandons_the_lend(world: World) -> None:
    """Otherwise the hybrids stay held with half their weights and the trainer can never get its GPUs back."""
    lending(world, "EndStep")

    def update_weights(target: WeightTarget) -> None:
        if target.role == engine_pb2.REPLICA_ROLE_HYBRID:
            raise RuntimeError("NCCL timed out \ud800")

    hooks = TrainerHooks.open(world.setup(update_weights=update_weights))
    with pytest.raises(RuntimeError, match="NCCL timed out"):
        hooks.on_step_end(1)
    hooks.close()
    tail = ["BeginWeightUpdate", "AbortWeightUpdate", "AbandonLend"]
    assert world.names()[-3:] == tail
    assert world.requests("AbortWeightUpdate")[0].update_id == "u-h"
    (abandoned,) = world.requests("AbandonLend")
    assert abandoned.lend_id == "lend-1"
    assert abandoned.reason.startswith("RuntimeError: NCCL timed out")
    assert hooks.mode == events_pb2.MODE_TRAINER


def test_standalone_replicas_that_fail_during_a_lend_abandon_it_and_raise(world: World) -> None:
    """Engines that live and refuse the weights again and again have a fault that the trainer has to hear of."""
    lending(world, "EndStep")
    standalone_answer(world)
    world.engine.script["BeginWeightUpdate"] = failing(grpc.StatusCode.ABORTED, "PARTIAL", operation_id="op-1")
    hooks = TrainerHooks.open(world.setup())
    with pytest.raises(PartialFailure):
        hooks.on_step_end(1)
    hooks.close()
    assert world.names()[-3:] == ["BeginWeightUpdate", "ListReplicas", "AbandonLend"]
    assert len(world.requests("BeginWeightUpdate")) == 5


def test_a_lend_does_not_wait_for_standalone_replicas_that_are_away(world: World) -> None:
    """The last one died under the update: the trainer had to be started again, with hybrids ready to generate."""
    lending(world, "EndStep")
    refuse = failing(grpc.StatusCode.UNAVAILABLE, "PARTIAL", operation_id="op-1")
    world.engine.script["BeginWeightUpdate"] = in_turn(refuse, begin_update)
    standalone_answer(world, engine_pb2.REPLICA_HEALTH_DEAD)
    with TrainerHooks.open(world.setup()) as hooks:
        metrics = hooks.on_step_end(1)
        assert hooks.mode == events_pb2.MODE_ROLLOUT
    assert metrics["turnout/weights/standalone_away"] == 1.0
    roles = [list(request.selector.roles) for request in world.requests("BeginWeightUpdate")]
    assert roles == [[engine_pb2.REPLICA_ROLE_STANDALONE], [engine_pb2.REPLICA_ROLE_HYBRID]]


def test_an_update_waits_for_a_standalone_replica_that_died_under_it(world: World) -> None:
    """PARTIAL came out of the hook, and the trainer had to be started again although the replica was back at once."""
    refuse = failing(grpc.StatusCode.UNAVAILABLE, "PARTIAL", operation_id="op-1")
    world.engine.script["BeginWeightUpdate"] = in_turn(*[refuse] * 7, begin_update)
    standalone_answer(world, engine_pb2.REPLICA_HEALTH_DEAD)
    with TrainerHooks.open(world.setup()) as hooks:
        hooks.on_step_end(1)
    assert len(world.requests("BeginWeightUpdate")) == 8


def test_an_update_does_not_wait_for_ever(world: World) -> None:
    """Whoever runs the trainer has to hear in the end that its standalone replicas never came back."""
    world.engine.script["BeginWeightUpdate"] = failing(grpc.StatusCode.FAILED_PRECONDITION, "NO_REPLICA")
    options = dataclasses.replace(OPTIONS, timeouts=Timeouts(outage=0.2))
    with TrainerHooks.open(world.setup(options=options)) as hooks, pytest.raises(FailedPrecondition) as caught:
        hooks.on_step_end(1)
    assert caught.value.reason == "NO_REPLICA"


def test_a_callback_that_raises_without_a_lend_aborts_the_update(world: World) -> None:
    """Replicas that are left paused in an open transaction serve nobody."""

    def update_weights(target: WeightTarget) -> None:
        raise RuntimeError("no route to host")

    hooks = TrainerHooks.open(world.setup(update_weights=update_weights))
    with pytest.raises(RuntimeError, match="no route to host"):
        hooks.on_step_end(1)
    hooks.close()
    assert world.names()[-2:] == ["BeginWeightUpdate", "AbortWeightUpdate"]


@pytest.mark.parametrize("call", ["CompleteLend", "hybrid"])
def test_engines_that_fail_during_a_lend_cost_speed_and_not_the_training(world: World, call: str) -> None:
    """A dead hybrid engine must not kill a training that could go on without lending."""
    lending(world, "EndStep")
    broken = failing(grpc.StatusCode.ABORTED, "LEND_FAILED")
    if call == "CompleteLend":
        world.scheduler.script[call] = broken
    else:
        world.engine.script["BeginWeightUpdate"] = in_turn(begin_update, broken)
    with TrainerHooks.open(world.setup()) as hooks:
        metrics = hooks.on_step_end(1)
        assert hooks.mode == events_pb2.MODE_TRAINER
        assert metrics["turnout/lend_abandoned"] == 1.0
        hooks.on_step_begin(2)
    assert "AbandonLend" in world.names()
    # What the standalone update took is still told.
    assert world.requests("BeginStep")[0].HasField("standalone_update")


def test_a_lend_that_cannot_be_abandoned_either_is_an_error(world: World) -> None:
    """Training on GPUs that may still be lent would run out of memory at best."""
    lending(world, "EndStep")
    world.scheduler.script["CompleteLend"] = failing(grpc.StatusCode.ABORTED, "LEND_FAILED")
    world.scheduler.script["AbandonLend"] = failing(grpc.StatusCode.ABORTED, "ABORT_LEND_FAILED")
    hooks = TrainerHooks.open(world.setup())
    with pytest.raises(Exception, match=" / LEND_FAILED"):
        hooks.on_step_end(1)
    hooks.close()


@pytest.mark.parametrize("when", ["start", "step"])
def test_a_lend_that_could_not_be_abandoned_is_when_the_hook_is_called_again(world: World, when: str) -> None:
    """The controller had closed the lend, the scheduler had not: no call but its end was taken, and none told it."""
    lending(world, "EndStep")
    world.scheduler.script["CompleteLend"] = failing(grpc.StatusCode.ABORTED, "LEND_FAILED")
    failed = failing(grpc.StatusCode.ABORTED, "ABORT_LEND_FAILED")
    world.scheduler.script["AbandonLend"] = in_turn(failed, world.scheduler.script["AbandonLend"])
    if when == "start":
        opened = scheduler_pb2.OpenRunResponse(epoch=7, next_step=1, lend=LEND)
        world.scheduler.script["OpenRun"] = lambda request, context: opened
    with TrainerHooks.open(world.setup()) as hooks:
        hook: Callable[[], dict[str, float]] = hooks.on_init_end if when == "start" else lambda: hooks.on_step_end(1)
        with pytest.raises(Aborted, match=" / LEND_FAILED"):
            hook()
        assert hook()["turnout/lend_abandoned"] == 1.0
        assert hooks.mode == events_pb2.MODE_TRAINER
        told = world.names().count("AbandonLend")
        hooks.on_init_end()
        assert world.names().count("AbandonLend") == told == 2, "what is closed is over"


def test_a_lend_that_the_scheduler_has_abandoned_by_itself_is_over(world: World) -> None:
    """It went on with an AbandonLend that a crash had cut; the hook raised LEND_CLOSED however often it was called."""
    lending(world, "EndStep")
    world.scheduler.script["CompleteLend"] = failing(grpc.StatusCode.FAILED_PRECONDITION, "LEND_CLOSED")
    with TrainerHooks.open(world.setup()) as hooks:
        assert hooks.on_step_end(1)["turnout/lend_abandoned"] == 1.0
        assert hooks.mode == events_pb2.MODE_TRAINER


def test_a_lend_within_a_step_installs_weights_and_asks_again(world: World) -> None:
    """The second call, one attempt higher, is the one that waits until the GPUs are back."""

    def begun(**answer: Any) -> Any:
        return events(scheduler_pb2.BeginSampleResponse(done=scheduler_pb2.BeginSampleDone(**answer)))

    world.scheduler.script["BeginSample"] = in_turn(begun(lend=LEND), begun(proceed=scheduler_pb2.Proceed()))
    with TrainerHooks.open(world.setup()) as hooks:
        hooks.on_sample_begin(1, 0)
    assert [request.attempt for request in world.requests("BeginSample")] == [0, 1]
    assert world.names()[-3:] == ["CompleteLend", "BeginSample", "CloseRun"]


def test_a_lend_within_a_step_is_fulfilled_once_though_the_hook_is_called_again(world: World) -> None:
    """After an error in the wait that follows a lend, the same attempt would give the same lend, closed by now."""

    def begun(**answer: Any) -> Any:
        return events(scheduler_pb2.BeginSampleResponse(done=scheduler_pb2.BeginSampleDone(**answer)))

    world.scheduler.script["BeginSample"] = in_turn(
        begun(lend=LEND), failing(grpc.StatusCode.ABORTED, "RECLAIM_FAILED"), begun(proceed=scheduler_pb2.Proceed())
    )
    with TrainerHooks.open(world.setup()) as hooks:
        with pytest.raises(Aborted):
            hooks.on_sample_begin(1, 0)
        hooks.on_sample_begin(1, 0)
        hooks.on_sample_begin(1, 1)
    assert [(asked.mini_batch, asked.attempt) for asked in world.requests("BeginSample")] == [
        (0, 0),
        (0, 1),
        (0, 1),
        (1, 0),
    ]
    assert world.names().count("CompleteLend") == 1


# -------------------------------------------------------------------------------------------------------------- weights


def test_staggered_updates_go_wave_by_wave(world: World) -> None:
    """Each wave has its own number; committing the wrong one is refused, or stamps replicas that got nothing."""
    world.engine.script["BeginWeightUpdate"] = lambda request, context: engine_pb2.BeginWeightUpdateResponse(
        update_id="u1", wave=[layout("s0")], remaining=["s1"]
    )
    world.engine.script["CommitWeightUpdate"] = in_turn(
        lambda request, context: engine_pb2.CommitWeightUpdateResponse(wave=[layout("s1")], next_wave_index=1),
        lambda request, context: engine_pb2.CommitWeightUpdateResponse(complete=True),
    )
    targets: list[WeightTarget] = []
    with TrainerHooks.open(world.setup(update_weights=targets.append, staggered=True)) as hooks:
        hooks.on_step_end(4)
    assert [(target.replica_ids, target.wave_index) for target in targets] == [(["s0"], 0), (["s1"], 1)]
    assert [request.wave_index for request in world.requests("CommitWeightUpdate")] == [0, 1]
    assert world.requests("BeginWeightUpdate")[0].staggered
    assert {target.weight_version for target in targets} == {4}


def test_replicas_that_bytes_did_not_reach_are_not_acknowledged(world: World) -> None:
    """A replica stamped with a version it does not hold trains the policy on the wrong distribution."""
    world.engine.script["UpdateWeights"] = lambda frames, context: engine_pb2.UpdateWeightsResponse(
        operation=operation(s0=engine_pb2.OUTCOME_KIND_DONE, s1=engine_pb2.OUTCOME_KIND_FAILED)
    )
    with TrainerHooks.open(world.setup()) as hooks:
        hooks.on_step_end(1, lambda target: hooks.move_bytes(target, b"weights"))
    (frames,) = world.requests("UpdateWeights")
    assert list(frames[0].header.replica_ids) == ["s0", "s1"]
    (commit,) = world.requests("CommitWeightUpdate")
    assert {ack.replica_id: ack.ok for ack in commit.acks} == {"s0": True, "s1": False}


@pytest.mark.parametrize("taken", [True, False])
def test_a_partial_commit_is_enough_if_one_replica_took_it(
    world: World, taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One dead standalone replica must not end the training; if all answer and none takes them, nothing will come."""
    standalone_answer(world)
    world.engine.script["CommitWeightUpdate"] = failing(grpc.StatusCode.UNAVAILABLE, "PARTIAL", operation_id="op-1")
    kind = engine_pb2.OUTCOME_KIND_DONE if taken else engine_pb2.OUTCOME_KIND_FAILED
    world.engine.script["GetOperation"] = lambda request, context: engine_pb2.GetOperationResponse(
        operation=operation(s0=kind, s1=engine_pb2.OUTCOME_KIND_FAILED)
    )
    hooks = TrainerHooks.open(world.setup())
    if taken:
        hooks.on_step_end(1)
        assert "did not reach replicas s1" in caplog.text
        assert [request.update_id for request in world.requests("AbortWeightUpdate")] == ["u-s"]
    else:
        with pytest.raises(Exception, match="PARTIAL"):
            hooks.on_step_end(1)
    hooks.close()


def test_without_standalone_gpus_there_is_nothing_to_update(world: World) -> None:
    """A selection of no replicas is an error at the engine."""
    config = scheduler_pb2.RunConfig(train_batch_size=2, standalone_gpus=0)
    with TrainerHooks.open(world.setup(config=config)) as hooks:
        hooks.on_step_end(1)
    assert "BeginWeightUpdate" not in world.names()


def test_moving_weights_without_a_callback_is_refused_before_anything_is_called(world: World) -> None:
    """EndStep cannot be taken back; finding out after it leaves the step half closed."""
    with TrainerHooks.open(world.setup(update_weights=None)) as hooks:
        with pytest.raises(ValueError, match="update_weights"):
            hooks.on_step_end(1)
        assert "EndStep" not in world.names()


# ------------------------------------------------------------------------------------------------------------- sampling


def sample_ends(outcome: buffer_pb2.WaitOutcome.ValueType, lease: str = "") -> Any:
    ended = buffer_pb2.SampleDone(outcome=outcome, lease_id=lease, reason="5 of 8 groups", next_cursor=20)
    return events(buffer_pb2.SampleResponse(done=ended))


def test_a_mini_batch_has_one_request_id_until_it_is_released(world: World) -> None:
    """A trainer that asks again after an error must get the batch that was leased to it, not a second one."""
    world.buffer.script["Sample"] = sample_ends(buffer_pb2.WAIT_OUTCOME_REACHED, "l1")
    with TrainerHooks.open(world.setup()) as hooks:
        hooks.sample(1, 0, 2)
        hooks.sample(1, 0, 2).release()
        hooks.sample(1, 0, 2)
        hooks.sample(1, 1, 2)
    first, again, new, other = (request.request_id for request in world.requests("Sample"))
    assert first == again
    assert len({first, new, other}) == 3


def test_a_batch_that_is_not_reached_says_why_and_keeps_the_cursor(world: World) -> None:
    """Moving the cursor there would lose the evictions that happened meanwhile from the metrics."""
    world.buffer.script["Sample"] = in_turn(
        sample_ends(buffer_pb2.WAIT_OUTCOME_EXHAUSTED), sample_ends(buffer_pb2.WAIT_OUTCOME_REACHED, "l1")
    )
    with TrainerHooks.open(world.setup()) as hooks:
        with pytest.raises(NotReached, match="EXHAUSTED: 5 of 8 groups") as caught:
            hooks.sample(1, 0, 8)
        assert caught.value.outcome == buffer_pb2.WAIT_OUTCOME_EXHAUSTED
        hooks.sample(1, 0, 5)
        hooks.sample(1, 1, 5)
    assert [request.cursor for request in world.requests("Sample")] == [11, 11, 20]


def test_a_batch_is_released_if_training_on_it_fails(world: World) -> None:
    """A batch that is committed although the step raised is lost data."""
    world.buffer.script["Sample"] = sample_ends(buffer_pb2.WAIT_OUTCOME_REACHED, "l1")
    with TrainerHooks.open(world.setup()) as hooks, contextlib.suppress(ZeroDivisionError), hooks.sample(1, 0, 2):
        raise ZeroDivisionError
    assert world.names()[-2:] == ["ReleaseSample", "CloseRun"]


def test_on_sample_end_needs_a_beginning(world: World) -> None:
    """A wait measured from nothing would poison the policy's cost estimate."""
    with TrainerHooks.open(world.setup()) as hooks, pytest.raises(RuntimeError, match="on_sample_begin"):
        hooks.on_sample_end(1, 0)


def test_a_trainer_may_pay_refills_by_itself_and_share_its_cursor(world: World) -> None:
    """Where prompts enter the buffer by another way, the hooks must not decline what that way pays."""

    paid: list[tuple[str, int]] = []

    class Pays:
        async def pay(self, due: buffer_pb2.RefillDue, step: int) -> None:
            paid.append((due.refill_claim_id, step))

    due = buffer_pb2.RefillDue(count=1, refill_claim_id="c1")
    done = scheduler_pb2.PrepareStepDone(outcome=buffer_pb2.WAIT_OUTCOME_REACHED, next_cursor=9)
    world.scheduler.script["PrepareStep"] = events(
        scheduler_pb2.PrepareStepResponse(refill_due=due), scheduler_pb2.PrepareStepResponse(done=done)
    )
    with TrainerHooks.open(world.setup(refills=Pays())) as hooks:
        hooks.cursor = 4
        hooks.prepare_step(1)
        assert hooks.cursor == 9
    assert paid == [("c1", 1)]
    assert [request.cursor for request in world.requests("PrepareStep")] == [4]
    assert world.requests("DeclineRefill") == []


def test_refills_of_a_step_are_born_at_that_step(world: World) -> None:
    """Prompts born at an older step would be stale sooner than they should."""
    due = buffer_pb2.RefillDue(count=1, refill_claim_id="c1")
    world.scheduler.script["PrepareStep"] = events(
        scheduler_pb2.PrepareStepResponse(refill_due=due),
        scheduler_pb2.PrepareStepResponse(done=scheduler_pb2.PrepareStepDone(outcome=buffer_pb2.WAIT_OUTCOME_REACHED)),
    )
    world.buffer.script["Sample"] = events(
        buffer_pb2.SampleResponse(refill_due=buffer_pb2.RefillDue(count=1, refill_claim_id="c2")),
        buffer_pb2.SampleResponse(done=buffer_pb2.SampleDone(outcome=buffer_pb2.WAIT_OUTCOME_REACHED)),
    )
    prompt = [buffer_pb2.GroupSpec(group_id="new")]
    with TrainerHooks.open(world.setup(refill_fn=lambda count: prompt)) as hooks:
        hooks.prepare_step(6)
        hooks.sample(7, 0, 1)
    paid = [(request.refill_claim_id, request.step, request.epoch) for request in world.requests("AddGroups")]
    assert paid == [("c1", 6, 7), ("c2", 7, 7)]


# ----------------------------------------------------------------------------------------- heartbeats, saving, resuming


def test_heartbeats_go_on_while_the_trainer_trains(world: World) -> None:
    """A backward pass of ten minutes must not cost the lease."""
    world.scheduler.script["Heartbeat"] = lambda request, context: scheduler_pb2.HeartbeatResponse(lease=duration(0.15))
    with TrainerHooks.open(world.setup()):
        world.scheduler.wait_for("Heartbeat", 4)
    assert {request.epoch for request in world.requests("Heartbeat")} == {7}
    assert not [thread for thread in threading.enumerate() if "heartbeat" in thread.name]


def test_a_failed_heartbeat_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hiccup of the scheduler must not end the heartbeats for good."""
    monkeypatch.setattr("turnout.trainer._heartbeat._AFTER_FAILURE_S", 0.01)
    world.scheduler.script["Heartbeat"] = in_turn(
        failing(grpc.StatusCode.INTERNAL),
        lambda request, context: scheduler_pb2.HeartbeatResponse(lease=duration(0.15)),
    )
    with TrainerHooks.open(world.setup()):
        world.scheduler.wait_for("Heartbeat", 3)


def test_a_trainer_that_was_replaced_learns_it_at_its_next_hook(world: World) -> None:
    """Two trainers that both believe in their epoch would train on the same groups."""
    world.scheduler.script["Heartbeat"] = failing(grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
    hooks = TrainerHooks.open(world.setup())
    world.scheduler.wait_for("Heartbeat")
    hooks._core._heartbeat._thread.join(10)
    with pytest.raises(StaleEpoch):
        hooks.on_step_begin(1)
    assert "BeginStep" not in world.names()
    hooks.close()


def test_save_gives_the_manifest_that_a_resume_starts_from(world: World) -> None:
    """What is written beside the model must be enough to go on."""
    manifest = '{"checkpoint_id": "ckpt-4", "step": 4}'
    world.scheduler.script["Save"] = lambda request, context: scheduler_pb2.SaveResponse(manifest_json=manifest)
    with TrainerHooks.open(world.setup()) as hooks:
        saved = hooks.save(4)
    with TrainerHooks.open(world.setup(resume=resume_from(saved, 4), take_over=True)):
        pass
    opened = world.requests("OpenRun")[-1]
    assert (opened.resume.resume_step, opened.resume.checkpoint_id, opened.take_over) == (4, "ckpt-4", True)


def test_each_move_of_a_wave_has_a_number_and_one_that_failed_leaves_its_own(world: World) -> None:
    """The engine takes a move for the repeat of the one before unless it is told, and puts one of two elsewhere."""
    fails = failing(grpc.StatusCode.ABORTED, "PARTIAL", operation_id="op-1")
    world.engine.script["UpdateWeights"] = in_turn(
        lambda request, context: engine_pb2.UpdateWeightsResponse(),
        fails,
        lambda request, context: engine_pb2.UpdateWeightsResponse(),
    )

    def update_weights(target: WeightTarget) -> None:
        hooks.move_bytes(target, b"first")
        if target.weight_version == 1:
            with pytest.raises(PartialFailure):
                hooks.move_bytes(target, b"second")
            hooks.move_bytes(target, b"second")

    hooks = TrainerHooks.open(world.setup(update_weights=update_weights))
    with hooks:
        hooks.on_step_end(1)
        hooks.on_step_end(2)
    assert [frames[0].header.move_index for frames in world.requests("UpdateWeights")] == [0, 1, 1, 0]


def test_moves_are_numbered_for_each_replica_by_itself(world: World) -> None:
    """Replicas that each got a part of their own were refused it, but for the first: they had not seen the others'."""
    world.engine.script["UpdateWeights"] = lambda request, context: engine_pb2.UpdateWeightsResponse()

    def update_weights(target: WeightTarget) -> None:
        for replica in target.replicas:
            hooks.move_bytes(dataclasses.replace(target, replicas=(replica,)), replica.replica_id.encode())
        hooks.move_bytes(target, b"what all share")

    hooks = TrainerHooks.open(world.setup(update_weights=update_weights))
    with hooks:
        hooks.on_step_end(1)
    headers = [frames[0].header for frames in world.requests("UpdateWeights")]
    moved = [(list(header.replica_ids), header.move_index) for header in headers]
    assert moved == [(["s0"], 0), (["s1"], 0), (["s0", "s1"], 1)]
