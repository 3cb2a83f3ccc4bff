"""Registration, the run, epochs, operations: everything around the replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.engine.domain.engine_state import EngineState
from services.runtime.errors import failed_precondition
from tests.engine.helpers import (
    RUN,
    generate,
    kinds,
    lend,
    only,
    reclaim,
    refused,
    register,
    replicas,
    role,
    running,
    spec,
    until,
)
from tests.engine.recorder import in_engines, recorded, requests_running
from turnout.engine.v1 import engine_pb2 as pb


async def test_the_same_registration_is_fine_and_another_is_refused() -> None:
    """A trainer that restarts registers again; two that differ must not share an id."""
    async with running() as engine:
        first = await register(engine, "h0")
        assert await register(engine, "h0") == first
        call = engine.stub.Register(pb.RegisterRequest(run_id=RUN, spec=spec("h0", "standalone")))
        error = await refused(call, "ALREADY_EXISTS", "REPLICA_EXISTS")
        assert error.metadata["replica_id"] == "h0"


async def test_a_gpu_belongs_to_one_hybrid_replica() -> None:
    """Two replicas on one GPU would both be woken."""
    async with running() as engine:
        await register(engine, "h0", gpus=[pb.Gpu(node="n0", uuid="g")])
        call = engine.stub.Register(pb.RegisterRequest(run_id=RUN, spec=spec("h1", gpus=[pb.Gpu(node="n0", uuid="g")])))
        error = await refused(call, "FAILED_PRECONDITION", "GPU_TAKEN")
        assert (error.metadata["replica_id"], error.metadata["uuid"]) == ("h0", "g")
        await register(engine, "h1", gpus=[pb.Gpu(node="n1", uuid="g")])
        await register(engine, "s0", "standalone", gpus=[pb.Gpu(node="n0", uuid="g")])


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"backend": "nope"}, "UNKNOWN_BACKEND", "spec.backend"),
        ({"options": {"x": "1"}}, "UNKNOWN_OPTION", "spec.options"),
        ({"backend": "agent"}, "INVALID_ARGUMENT", "spec.endpoint"),
        ({"backend": "vllm-http", "endpoint": "10.0.0.7:8000"}, "INVALID_ARGUMENT", "spec.endpoint"),
        ({"backend": "vllm-http", "endpoint": "http://vllm:port"}, "INVALID_ARGUMENT", "spec.endpoint"),
        ({"backend": "vllm-http", "endpoint": "http://vllm:99999"}, "INVALID_ARGUMENT", "spec.endpoint"),
        ({"backend": "sglang-http", "endpoint": "http://[fd00::7"}, "INVALID_ARGUMENT", "spec.endpoint"),
        ({"backend": "sglang-http", "endpoint": "http://\0/"}, "INVALID_ARGUMENT", "spec.endpoint"),
        ({"gpus": []}, "INVALID_ARGUMENT", "spec.gpus"),
        ({"shards": 0}, "INVALID_ARGUMENT", "spec.shards"),
        ({"weights": 9}, "INVALID_ARGUMENT", "spec.weights"),
    ],
)
async def test_a_wrong_spec_changes_nothing(fields: dict[str, Any], reason: str, field: str) -> None:
    """The answer names the field, and no run is bound by it."""
    async with running() as engine:
        call = engine.stub.Register(pb.RegisterRequest(run_id=RUN, spec=spec("h0", **fields)))
        error = await refused(call, "INVALID_ARGUMENT", reason)
        assert error.metadata["field"] == field
        await refused(engine.stub.ListReplicas(pb.ListReplicasRequest(run_id=RUN)), "NOT_FOUND", "RUN_NOT_FOUND")


async def test_a_role_has_to_be_said() -> None:
    """UNSPECIFIED is no role."""
    async with running() as engine:
        request = pb.RegisterRequest(run_id=RUN, spec=pb.ReplicaSpec(replica_id="h0", backend="reference"))
        error = await refused(engine.stub.Register(request), "INVALID_ARGUMENT", "INVALID_ARGUMENT")
        assert error.metadata["field"] == "spec.role"


async def test_an_engine_that_does_not_answer_is_not_added() -> None:
    """A replica nobody has seen would be lent."""
    async with running(probe_timeout=2.0) as engine:
        request = pb.RegisterRequest(run_id=RUN, spec=spec("h0", backend="agent", endpoint="127.0.0.1:1"))
        error = await refused(engine.stub.Register(request), "UNAVAILABLE", "ENGINE_UNREACHABLE")
        assert error.metadata["value"] == "127.0.0.1:1"
        await register(engine, "h1")
        assert list(await replicas(engine)) == ["h1"]


async def test_an_agent_without_the_replica_is_named() -> None:
    """A typing error in an id must not look like a network fault."""
    async with running(agent=True, replica=["h0:hybrid"]) as agent, running() as engine:
        request = pb.RegisterRequest(run_id=RUN, spec=spec("h9", backend="agent", endpoint=agent.host.target))
        await refused(engine.stub.Register(request), "NOT_FOUND", "REPLICA_NOT_FOUND")


async def test_a_removed_replica_hands_its_requests_on() -> None:
    """With the tokens they have."""
    async with (
        recorded("s0:standalone", scale=0.05) as (engine, _),
        requests_running(engine, 2, max_tokens=2000, sampling=pb.Sampling(seed=1)) as tasks,
    ):
        await register(engine, "s1", "standalone")
        await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="s0"))
        outputs = [await task for task in tasks]
        for output in outputs:
            assert [s.replica_id for s in output.segments][-1] == "s1"
            assert sum(s.tokens for s in output.segments) == len(output.tokens) == 2000
        assert list(await replicas(engine)) == ["s1"]
        await refused(
            engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="s0")),
            "NOT_FOUND",
            "REPLICA_NOT_FOUND",
        )


async def test_selectors() -> None:
    """Both lists narrow; an unknown id is an error and not an empty answer."""
    async with recorded("h0:hybrid", "h1:hybrid", "s0:standalone") as (engine, _):

        async def chosen(selector: pb.ReplicaSelector) -> list[str]:
            answer = await engine.stub.ListReplicas(pb.ListReplicasRequest(run_id=RUN, selector=selector))
            return [replica.spec.replica_id for replica in answer.replicas]

        assert await chosen(pb.ReplicaSelector()) == ["h0", "h1", "s0"]
        assert await chosen(role("hybrid")) == ["h0", "h1"]
        assert await chosen(only("s0", "h1")) == ["h1", "s0"]
        assert await chosen(pb.ReplicaSelector(replica_ids=["s0"], roles=[pb.REPLICA_ROLE_HYBRID])) == []
        await refused(chosen(only("x")), "NOT_FOUND", "REPLICA_NOT_FOUND")


# --------------------------------------------------------------------------------------------------- runs and epochs


async def test_a_newer_trainer_fences_the_older_one() -> None:
    """A trainer that was replaced and comes back must not move GPUs."""
    async with recorded("h0:hybrid") as (engine, recorders):
        await engine.stub.Pause(pb.PauseRequest(run_id=RUN))
        answer = await engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN))
        assert (answer.epoch, bool(answer.incarnation)) == (1, True)
        assert (await engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN, epoch=5))).epoch == 5
        listed = await engine.stub.ListReplicas(pb.ListReplicasRequest(run_id=RUN))
        assert (listed.epoch, listed.incarnation) == (5, answer.incarnation)
        recorders.forget()
        for epoch, reason in ((4, "STALE_EPOCH"), (6, "UNKNOWN_EPOCH"), (None, "EPOCH_REQUIRED")):
            error = await refused(
                engine.stub.Resume(pb.ResumeRequest(run_id=RUN, epoch=epoch)), "FAILED_PRECONDITION", reason
            )
            assert error.metadata["current"] == "5"
            await refused(
                engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN, epoch=epoch)), "FAILED_PRECONDITION", reason
            )
        assert recorders.journal == []
        await engine.stub.Resume(pb.ResumeRequest(run_id=RUN, epoch=5))
        again = engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN, epoch=5))
        await refused(again, "FAILED_PRECONDITION", "STALE_EPOCH")


async def test_a_repeated_mutation_gets_the_first_answer() -> None:
    """A retry after a lost reply must not open a second epoch, nor a second transaction."""
    async with recorded("s0:standalone") as (engine, _):
        request = pb.OpenEpochRequest(run_id=RUN, request_id="q1")
        assert (await engine.stub.OpenEpoch(request)).epoch == (await engine.stub.OpenEpoch(request)).epoch == 1
        other = pb.OpenEpochRequest(run_id=RUN, epoch=9, request_id="q1")
        await refused(engine.stub.OpenEpoch(other), "INVALID_ARGUMENT", "REQUEST_ID_REUSED")
        begin = pb.BeginWeightUpdateRequest(run_id=RUN, epoch=1, weight_version=1, request_id="q2")
        first, second = await asyncio.gather(engine.stub.BeginWeightUpdate(begin), engine.stub.BeginWeightUpdate(begin))
        assert first == second


async def test_a_controller_serves_the_run_it_was_started_for() -> None:
    """Two runs on one controller would move each other's GPUs."""
    async with running(run="named") as engine:
        call = engine.stub.Register(pb.RegisterRequest(run_id=RUN, spec=spec("h0")))
        await refused(call, "FAILED_PRECONDITION", "RUN_BOUND")
        await refused(engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN)), "FAILED_PRECONDITION", "RUN_BOUND")
        await engine.stub.ListReplicas(pb.ListReplicasRequest(run_id="named"))


# --------------------------------------------------------------------------------------------------------- operations


async def test_operations_can_be_read_later() -> None:
    """Whoever lost the answer finds out what happened."""
    async with recorded("h0:hybrid", "s0:standalone") as (engine, _):
        done = (await engine.stub.Sleep(pb.SleepRequest(run_id=RUN))).operation
        assert (done.kind, done.state, kinds(done)) == (
            "Sleep",
            pb.OPERATION_STATE_SUCCEEDED,
            {"h0": "DONE", "s0": "SKIPPED"},
        )
        assert {o.replica_id: o.reason for o in done.outcomes} == {"h0": "", "s0": "ROLE_SKIPPED"}
        read = await engine.stub.GetOperation(pb.GetOperationRequest(run_id=RUN, operation_id=done.operation_id))
        assert read.operation == done
        await engine.stub.Pause(pb.PauseRequest(run_id=RUN))
        page = await engine.stub.ListOperations(pb.ListOperationsRequest(run_id=RUN, page_size=1))
        assert ([operation.kind for operation in page.operations], bool(page.next_page_token)) == (["Pause"], True)
        call = engine.stub.GetOperation(pb.GetOperationRequest(run_id=RUN, operation_id="gone"))
        await refused(call, "NOT_FOUND", "OPERATION_NOT_FOUND")


async def test_an_operation_goes_on_without_its_caller() -> None:
    """A trainer that loses its connection in the middle of a reclaim still gets its GPUs."""
    async with recorded("h0:hybrid") as (engine, recorders):
        gate = asyncio.Event()
        recorders["h0"].faults["sleep(2)"] = [gate]
        call = engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN))
        waiting = asyncio.ensure_future(call)
        await until(lambda: "sleep(2)" in recorders["h0"].calls)
        call.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gate.set()

        async def free() -> bool:
            return (await replicas(engine))["h0"].confirmed_free

        await until(free)


async def test_methods_have_to_be_allowed() -> None:
    """A method by name is code execution."""
    async with recorded("s0:standalone", allow_method=["weight_checksum"]) as (engine, recorders):
        call = pb.CollectiveRpcRequest(run_id=RUN, method="fault_die")
        error = await refused(engine.stub.CollectiveRpc(call), "PERMISSION_DENIED", "METHOD_NOT_ALLOWED")
        assert error.metadata["value"] == "fault_die"
        for arguments in ("[]", "{", '{"other": 1}'):
            call = pb.CollectiveRpcRequest(run_id=RUN, method="weight_checksum", arguments_json=arguments)
            error = await refused(engine.stub.CollectiveRpc(call), "INVALID_ARGUMENT", "INVALID_ARGUMENT")
            assert error.metadata["field"] == "arguments_json"
        assert recorders.journal == []


async def test_a_timeout_has_to_be_positive() -> None:
    """Zero would fail every replica before it was asked."""
    async with recorded("h0:hybrid") as (engine, _):
        request = pb.SleepRequest(run_id=RUN)
        request.timeout.seconds = -1
        error = await refused(engine.stub.Sleep(request), "INVALID_ARGUMENT", "INVALID_ARGUMENT")
        assert error.metadata["field"] == "timeout"


async def test_draining_ends_requests_and_refuses_commands() -> None:
    """A controller that stops must not leave its callers hanging."""
    async with running(time_scale=1.0) as engine:
        await register(engine, "s0", "standalone")
        task = asyncio.create_task(generate(engine, "r", max_tokens=100_000))
        await until(lambda: in_engines(engine) == 1)
        stopping = asyncio.create_task(engine.host.stop(5.0))
        await refused(task, "UNAVAILABLE", "DRAINING")
        assert await stopping


async def test_a_repeat_after_partial_goes_on_with_what_is_left() -> None:
    """With its request_id a reset touches the replica that was busy, and no other."""
    async with recorded("s0:standalone", "s1:standalone") as (engine, recorders):
        recorders["s1"].faults["reset(prefix)"] = [failed_precondition("CACHE_BUSY", "blocks in use")]
        request = pb.ResetCachesRequest(run_id=RUN, caches=[pb.CACHE_KIND_PREFIX], request_id="q")
        error = await refused(engine.stub.ResetCaches(request), "FAILED_PRECONDITION", "PARTIAL")
        other = pb.ResetCachesRequest(run_id=RUN, request_id="q")
        await refused(engine.stub.ResetCaches(other), "INVALID_ARGUMENT", "REQUEST_ID_REUSED")
        recorders.forget()
        done = (await engine.stub.ResetCaches(request)).operation
        assert (done.operation_id, kinds(done)) == (error.metadata["operation_id"], {"s0": "DONE", "s1": "DONE"})
        assert recorders.journal == [("s1", "reset(prefix)")]
        assert (await engine.stub.ResetCaches(request)).operation == done
        assert len(recorders.journal) == 1


async def test_a_newer_trainer_ends_what_the_older_one_began() -> None:
    """Its lend and its update would block the new one for ever."""
    async with recorded("h0:hybrid", "s0:standalone") as (engine, _):
        await lend(engine, "l", 0)
        begin = pb.BeginWeightUpdateRequest(run_id=RUN, selector=only("s0"), weight_version=1)
        begun = await engine.stub.BeginWeightUpdate(begin)
        opened = await engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN, epoch=4))
        assert opened.time_scale == 0.01
        now = await replicas(engine)
        assert (now["h0"].confirmed_free, now["s0"].update_id, now["s0"].route) == (True, "", pb.ROUTE_STATE_SERVING)
        commit = pb.CommitWeightUpdateRequest(run_id=RUN, epoch=4, update_id=begun.update_id)
        await refused(engine.stub.CommitWeightUpdate(commit), "FAILED_PRECONDITION", "UPDATE_CLOSED")
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, epoch=4, lend_id="l2"))


async def test_registration_under_an_epoch() -> None:
    """An operator may always register; a trainer that was replaced may not."""
    async with recorded("s0:standalone") as (engine, _):
        await engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN, epoch=4))
        await register(engine, "s1", "standalone")
        late = engine.stub.Register(pb.RegisterRequest(run_id=RUN, epoch=3, spec=spec("s2", "standalone")))
        await refused(late, "FAILED_PRECONDITION", "STALE_EPOCH")
        gone = engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, epoch=3, replica_id="s1"))
        await refused(gone, "FAILED_PRECONDITION", "STALE_EPOCH")
        await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, epoch=4, replica_id="s1"))


async def test_a_hybrid_replica_that_comes_during_a_lend_takes_part() -> None:
    """A node that was slow to start would idle for a whole lend."""
    async with recorded("h0:hybrid") as (engine, recorders):
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        late = await register(engine, "h1")
        assert (late.lend_id, late.route) == ("l", pb.ROUTE_STATE_HELD)
        finish = pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=0)
        assert kinds((await engine.stub.FinishLend(finish)).operation) == {"h0": "DONE", "h1": "DONE"}
        assert ("h1", "reset(encoder,multimodal,prefix)") in recorders.journal


async def test_a_hybrid_replica_that_comes_between_two_lends_is_put_to_sleep() -> None:
    """A node that came back under another address: its engine is awake, and the trainer has its GPUs."""
    async with recorded("h0:hybrid") as (engine, recorders):
        await register(engine, "h1")
        await lend(engine, "l", 0)
        await reclaim(engine)
        await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="h1"))
        recorders.forget()
        await register(engine, "h1")
        await until(lambda: engine.controller.fleet.get("h1").replica.confirmed_free)
        assert "sleep(2)" in recorders["h1"].calls


@pytest.mark.parametrize("agent", [True, False])
async def test_an_agent_puts_nothing_to_sleep_by_itself(agent: bool) -> None:
    """Whether a new engine may be awake, the controller of the run knows: it may be about to send weights."""
    async with recorded("h0:hybrid", agent=agent, probe_interval=0.01) as (engine, recorders):
        replica, recorder = engine.controller.fleet.get("h0").replica, recorders["h0"]
        looks = 0

        async def probe() -> EngineState:
            nonlocal looks
            looks += 1
            return await recorder.engine.probe()

        recorder.probe = probe  # type: ignore[method-assign]
        replica.arrived_late()
        assert replica.stray
        await until(lambda: looks > 3)
        assert bool(recorder.calls) is not agent


async def test_a_list_may_ask_the_engines_first() -> None:
    """One that was free at the last probe may be another process by now; a list that asks no engine cannot know."""
    async with recorded("h0:hybrid", "h1:hybrid", probe_interval=3600.0, probe_timeout=0.3) as (engine, recorders):
        await lend(engine, "l", 0)
        await reclaim(engine)
        await recorders["h0"].engine.wake_up(["weights"], 1.0)
        assert (await replicas(engine))["h0"].confirmed_free
        recorders["h1"].faults["probe"] = [asyncio.Event()]
        recorders.forget()
        asked = await engine.stub.ListReplicas(pb.ListReplicasRequest(run_id=RUN, probe=True))
        assert not any(replica.confirmed_free for replica in asked.replicas)
        del recorders["h1"].faults["probe"]
        assert kinds((await reclaim(engine)).operation) == {"h0": "DONE", "h1": "SKIPPED"}
        assert recorders.journal == [("h0", "sleep(2)"), ("h0", "reset(encoder)")]
