"""Standalone replicas that come back without weights while the trainer waits for groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.client.fakes import failing, in_turn
from tests.client.test_hooks import World, operation, world
from turnout.buffer.v1 import buffer_pb2
from turnout.client import seconds
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import AsyncTrainerHooks, NotReached, TrainerHooks, TrainerSetup, WeightTarget
from turnout.trainer._restoring import lacking, serving

__all__ = ["world"]

HEALTHY, DEAD = engine_pb2.REPLICA_HEALTH_HEALTHY, engine_pb2.REPLICA_HEALTH_DEAD
OUT, SERVING = engine_pb2.ROUTE_STATE_OUT, engine_pb2.ROUTE_STATE_SERVING


def replica(name: str, version: int | None = None, **fields: Any) -> engine_pb2.Replica:
    role = engine_pb2.REPLICA_ROLE_HYBRID if name.startswith("h") else engine_pb2.REPLICA_ROLE_STANDALONE
    values = {"health": HEALTHY, "route": OUT if version is None else SERVING, "weight_version": version, **fields}
    return engine_pb2.Replica(spec=engine_pb2.ReplicaSpec(replica_id=name, role=role), **values)


class Fleet:
    """What the fake controller says of its replicas, to whoever asks and to whoever watches."""

    def __init__(self, world: World, *replicas: engine_pb2.Replica) -> None:
        self._changed = threading.Condition()
        self._replicas = {one.spec.replica_id: one for one in replicas}
        self._revision = 0
        world.engine.script |= {
            "ListReplicas": self._list,
            "WatchReplicas": self._watch,
            "BeginWeightUpdate": self._begin,
            "CommitWeightUpdate": self._commit,
        }
        self._open: list[str] = []
        self._version = 0

    def put(self, *replicas: engine_pb2.Replica) -> None:
        """They changed."""
        with self._changed:
            self._replicas |= {one.spec.replica_id: one for one in replicas}
            self._revision += 1
            self._changed.notify_all()

    def _list(self, request: Any, context: Any) -> engine_pb2.ListReplicasResponse:
        return engine_pb2.ListReplicasResponse(replicas=list(self._replicas.values()))

    def _watch(self, request: Any, context: Any) -> Iterator[engine_pb2.WatchReplicasResponse]:
        def ended() -> None:
            with self._changed:
                self._changed.notify_all()

        context.add_callback(ended)
        seen = -1
        while context.is_active():
            with self._changed:
                while self._revision == seen and context.is_active():
                    self._changed.wait()
                seen, now = self._revision, list(self._replicas.values())
            yield engine_pb2.WatchReplicasResponse(changed=now)

    def _begin(self, request: engine_pb2.BeginWeightUpdateRequest, context: Any) -> Any:
        self._open = list(request.selector.replica_ids) or ["s0", "s1"]
        self._version = request.weight_version
        wave = [engine_pb2.ReplicaLayout(replica_id=name) for name in self._open]
        return engine_pb2.BeginWeightUpdateResponse(update_id="u", wave=wave)

    def _commit(self, request: engine_pb2.CommitWeightUpdateRequest, context: Any) -> Any:
        self.put(*(replica(name, self._version) for name in self._open))
        done = operation(**dict.fromkeys(self._open, engine_pb2.OUTCOME_KIND_DONE))
        return engine_pb2.CommitWeightUpdateResponse(complete=True, operation=done)


class Supply:
    """The buffer's Sample: parked until groups are there, as the real one."""

    def __init__(self, world: World) -> None:
        self.ready = threading.Event()
        world.buffer.script["Sample"] = self._sample

    def _sample(self, request: buffer_pb2.SampleRequest, context: Any) -> Iterator[buffer_pb2.SampleResponse]:
        ends = time.monotonic() + seconds(request.max_wait) - 0.1
        while context.is_active() and not self.ready.wait(0.02):
            if time.monotonic() >= ends:
                done = buffer_pb2.SampleDone(outcome=buffer_pb2.WAIT_OUTCOME_TIMED_OUT)
                yield buffer_pb2.SampleResponse(done=done)
                return
        done = buffer_pb2.SampleDone(outcome=buffer_pb2.WAIT_OUTCOME_REACHED, lease_id="l1")
        yield buffer_pb2.SampleResponse(done=done)


def sample(setup: TrainerSetup, *, kind: str, mini_batch: int = 0, max_wait: float | None = None) -> dict[str, float]:
    """Bring version 4 to the replicas, then wait for a mini-batch of step 5; its metrics."""
    if kind == "blocking":
        with TrainerHooks.open(setup) as hooks:
            hooks.on_step_end(4)
            return hooks.sample(5, mini_batch, 2, max_wait=max_wait).metrics

    async def asynchronous() -> dict[str, float]:
        async with await AsyncTrainerHooks.open(setup) as hooks:
            await hooks.on_step_end(4)
            return (await hooks.sample(5, mini_batch, 2, max_wait=max_wait)).metrics

    return asyncio.run(asynchronous())


def in_background(setup: TrainerSetup, **how: Any) -> tuple[threading.Thread, list[dict[str, float]]]:
    """`sample` in a thread, and what it will have returned."""
    found: list[dict[str, float]] = []
    thread = threading.Thread(target=lambda: found.append(sample(setup, **how)))
    thread.start()
    return thread, found


def updates(world: World) -> list[tuple[list[str], int]]:
    """Replicas and version of every weight update."""
    return [(list(one.selector.replica_ids), one.weight_version) for one in world.requests("BeginWeightUpdate")]


KINDS = pytest.mark.parametrize("kind", ["blocking", "asyncio"])


@KINDS
def test_replicas_that_come_back_during_a_wait_get_the_weights_that_are_served(world: World, kind: str) -> None:
    """All standalone replicas were restarted within one step: nobody generated, and the trainer waited for ever."""
    fleet, supply = Fleet(world, replica("s0", 3), replica("s1", 3), replica("h0")), Supply(world)
    targets: list[WeightTarget] = []
    thread, found = in_background(world.setup(update_weights=targets.append), kind=kind)
    world.engine.wait_for("WatchReplicas")
    fleet.put(replica("s0", health=DEAD), replica("s1", health=DEAD))
    fleet.put(replica("s1"))
    world.engine.wait_for("BeginWeightUpdate", 2)
    world.engine.wait_for("WatchReplicas", 2)
    # The other one comes later, and is not forgotten.
    fleet.put(replica("s0"))
    world.engine.wait_for("WatchReplicas", 3)
    supply.ready.set()
    thread.join(20)
    assert updates(world) == [([], 4), (["s1"], 4), (["s0"], 4)]
    assert [target.restoring for target in targets] == [False, True, True]
    assert found[0]["turnout/weights/restored"] == 2.0
    # One request id through all of it: the batch is handed out once.
    assert len({request.request_id for request in world.requests("Sample")}) == 1


@KINDS
def test_replicas_that_came_back_while_the_trainer_trained_get_weights_in_its_next_wait(
    world: World, kind: str
) -> None:
    """They idled to the end of the step, since no change was left that anybody could have noticed."""
    fleet, supply = Fleet(world, replica("s0", 3), replica("s1", 3)), Supply(world)

    def update_weights(target: WeightTarget) -> None:
        if target.restoring:
            supply.ready.set()

    world.scheduler.script["EndStep"] = lambda request, context: scheduler_pb2.EndStepResponse()
    commit = world.engine.script["CommitWeightUpdate"]

    def committed(request: Any, context: Any) -> Any:
        answer = commit(request, context)
        if len(world.requests("CommitWeightUpdate")) == 1:
            fleet.put(replica("s0"))
        return answer

    world.engine.script["CommitWeightUpdate"] = committed
    sample(world.setup(update_weights=update_weights), kind=kind)
    assert updates(world) == [([], 4), (["s0"], 4)]


@KINDS
def test_a_trainer_that_need_not_wait_moves_no_weights(world: World, kind: str) -> None:
    """Groups that are there are to be trained on: moving weights first would stop a trainer that could compute."""
    fleet, supply = Fleet(world, replica("s0", 4), replica("s1")), Supply(world)
    supply.ready.set()
    commit = world.engine.script["CommitWeightUpdate"]

    def lost(request: Any, context: Any) -> Any:
        answer = commit(request, context)
        fleet.put(replica("s1"))
        return answer

    world.engine.script["CommitWeightUpdate"] = lost
    sample(world.setup(), kind=kind)
    assert updates(world) == [([], 4)]
    assert "WatchReplicas" not in world.names()


@pytest.mark.parametrize(("reinstalls", "others_serve", "restored"), [(0, 1, False), (0, 0, True), (1, 1, True)])
def test_in_the_middle_of_a_step_only_weights_that_the_trainer_has_are_moved(
    world: World, reinstalls: bool, others_serve: bool, restored: bool
) -> None:
    """After a mini-batch the trainer holds other weights than those that are served, unless it keeps a copy; what it
    has is better than nothing, and nothing else."""
    fleet, supply = Fleet(world, replica("s0"), replica("s1")), Supply(world)
    config = scheduler_pb2.RunConfig(standalone_gpus=2, can_reinstall=reinstalls)
    thread, _ = in_background(world.setup(config=config), kind="blocking", mini_batch=1)
    world.engine.wait_for("WatchReplicas")
    fleet.put(*([replica("s1")] if others_serve else [replica("s0"), replica("s1")]))
    if restored:
        world.engine.wait_for("BeginWeightUpdate", 2)
        world.engine.wait_for("WatchReplicas", 2)
    supply.ready.set()
    thread.join(20)
    lost = ["s1"] if others_serve else ["s0", "s1"]
    assert updates(world) == [([], 4), *([(lost, 4)] if restored else [])]


def test_a_replica_that_does_not_take_them_is_tried_again_and_ends_no_wait(world: World) -> None:
    """It may die again at once; the others generate meanwhile, and the trainer waits for their groups."""
    fleet, supply = Fleet(world, replica("s0", 4), replica("s1")), Supply(world)
    begin = world.engine.script["BeginWeightUpdate"]
    refuse = failing(grpc.StatusCode.UNAVAILABLE, "PARTIAL", operation_id="op-1")
    world.engine.script["BeginWeightUpdate"] = in_turn(begin, refuse, begin)
    commit = world.engine.script["CommitWeightUpdate"]

    def lost(request: Any, context: Any) -> Any:
        answer = commit(request, context)
        if len(world.requests("CommitWeightUpdate")) == 1:
            fleet.put(replica("s1"))
        return answer

    world.engine.script["CommitWeightUpdate"] = lost
    thread, found = in_background(world.setup(), kind="blocking")
    world.engine.wait_for("WatchReplicas")
    supply.ready.set()
    thread.join(20)
    assert updates(world) == [([], 4), (["s1"], 4), (["s1"], 4)]
    assert found[0]["turnout/weights/restored"] == 1.0


def test_what_the_callback_raises_in_a_wait_comes_out_of_it(world: World) -> None:
    """A trainer whose collective broke must not wait for ever with the reason in a log."""
    fleet, _ = Fleet(world, replica("s0", 4), replica("s1", 4)), Supply(world)

    def update_weights(target: WeightTarget) -> None:
        if target.restoring:
            raise RuntimeError("NCCL timed out")
        fleet.put(replica("s1"))

    world.engine.script["CommitWeightUpdate"] = lambda request, context: engine_pb2.CommitWeightUpdateResponse(
        complete=True
    )
    with pytest.raises(RuntimeError, match="NCCL timed out"):
        sample(world.setup(update_weights=update_weights), kind="blocking")
    assert world.names()[-1] == "AbortWeightUpdate"


def test_no_call_is_at_work_while_the_trainer_trains(world: World) -> None:
    """A data loader that forks beside a call at work gets children that cannot use gRPC, or crash in it."""
    _, supply = Fleet(world, replica("s0", 4), replica("s1", 4)), Supply(world)
    with TrainerHooks.open(world.setup()) as hooks:
        hooks.on_step_end(4)

        def supplied() -> None:
            world.engine.wait_for("WatchReplicas")
            supply.ready.set()

        threading.Thread(target=supplied).start()
        hooks.sample(5, 0, 2)
        assert not [thread for thread in threading.enumerate() if "replicas" in thread.name]


def test_lacking_replicas_are_healthy_standalone_ones_with_other_weights() -> None:
    """Weights for a dead replica, one in an update, or one of the trainer's own would be refused or harm."""
    everyone = [
        replica("s0", 4),
        replica("s1"),
        replica("s2", 3),
        replica("s3", health=DEAD),
        replica("s4", update_id="u"),
        replica("h0"),
    ]
    assert lacking(everyone, 4) == ["s1", "s2"]
    assert serving(everyone)
    assert not serving([replica("s1"), replica("h0")])


@KINDS
def test_a_controller_that_cannot_tell_of_its_replicas_ends_no_wait(world: World, kind: str) -> None:
    """It was away, or back without its memory, while finished groups kept coming: the wait ended with its error."""
    _, supply = Fleet(world, replica("s0", 4), replica("s1", 4)), Supply(world)
    world.engine.script["ListReplicas"] = failing(grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND")
    thread, found = in_background(world.setup(), kind=kind)
    world.buffer.wait_for("Sample", 2)
    supply.ready.set()
    thread.join(20)
    assert len(found) == 1


def test_after_an_update_that_failed_nothing_is_moved_under_the_version_before(world: World) -> None:
    """The trainer had the weights of step 5 by then, and replicas served them as those of step 4."""
    _, _ = Fleet(world, replica("s0", 4), replica("s1")), Supply(world)
    targets: list[int] = []

    def update_weights(target: WeightTarget) -> None:
        targets.append(target.weight_version)
        if target.weight_version == 5:
            raise RuntimeError("out of memory")

    world.engine.script["CommitWeightUpdate"] = lambda request, context: engine_pb2.CommitWeightUpdateResponse(
        complete=True
    )
    with TrainerHooks.open(world.setup(update_weights=update_weights)) as hooks:
        hooks.on_step_end(4)
        with pytest.raises(RuntimeError, match="out of memory"):
            hooks.on_step_end(5)
        with pytest.raises(NotReached):
            hooks.sample(6, 0, 2, max_wait=1.5)
    assert targets == [4, 5]


@KINDS
def test_a_replica_that_lacks_again_what_it_took_is_given_it_ever_more_rarely(world: World, kind: str) -> None:
    """One that told of another version than it was given had weights moved to it without end, and generated nothing."""
    Fleet(world, replica("s0", 4), replica("s1", 3))
    Supply(world)
    world.engine.script["CommitWeightUpdate"] = lambda request, context: engine_pb2.CommitWeightUpdateResponse(
        complete=True, operation=operation(s1=engine_pb2.OUTCOME_KIND_DONE)
    )
    with pytest.raises(NotReached):
        sample(world.setup(), kind=kind, max_wait=2.0)
    assert 1 < len(updates(world)) < 6
