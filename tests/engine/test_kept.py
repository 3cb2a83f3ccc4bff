"""What a controller keeps over restarts, and what it makes of a journal that is damaged, taken, or not its own."""

from __future__ import annotations

import asyncio
import sqlite3
from functools import partial as bind
from pathlib import Path
from typing import Any

import pytest

from services.engine.service import EngineService
from services.engine.storage import keeper
from services.engine.storage.keeper import Keeper
from services.engine.storage.schema import SCHEMA
from services.runtime.errors import TurnoutError, internal
from services.runtime.host import StartError
from services.runtime.journal import mending, open_journal
from tests.engine.helpers import (
    RUN,
    Engine,
    error_of,
    generate,
    kinds,
    lend,
    only,
    partial,
    refused,
    register,
    replicas,
    role,
    running,
    serving,
    until,
    update,
)
from tests.engine.lives import Engines
from tests.runtime.journal.helpers import Faults, opened, records_of
from turnout.engine.v1 import engine_pb2 as pb

SLEEP = pb.SleepRequest(run_id=RUN, request_id="sleep", epoch=4)


def keeper_of(engine: Engine) -> Keeper:
    """The keeper of a controller."""
    service = engine.host.service
    assert isinstance(service, EngineService)
    assert service.keeper is not None
    return service.keeper


async def with_replicas(engine: Engine) -> None:
    """Two hybrid replicas, one standalone, and an epoch."""
    for name in ("h0:hybrid", "h1:hybrid", "s0:standalone"):
        replica_id, _, its_role = name.partition(":")
        await register(engine, replica_id, its_role)
    await engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN, epoch=4))


async def test_run_epoch_replicas_and_versions_come_back_under_a_new_incarnation(tmp_path: Path) -> None:
    """A controller that came back empty would grant an old epoch again, and free GPUs that are lent."""
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await register(engine, "h0", flags=pb.ReplicaFlags(mtp_rollout=True), shards=2)
        await register(engine, "s0", "standalone", gpus=[])
        await lend(engine, "l", 3)
        await engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN, epoch=4))
        before = await replicas(engine)
        incarnation = engine.controller.incarnation
    async with engines.controlled(tmp_path) as engine:
        answer = await engine.stub.ListReplicas(pb.ListReplicasRequest(run_id=RUN))
        assert answer.epoch == 4
        assert answer.incarnation not in ("", incarnation)
        assert {replica.spec.replica_id: replica for replica in answer.replicas} == before
        await refused(engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN, epoch=3)), "FAILED_PRECONDITION", "STALE_EPOCH")
        await refused(register(engine, "h0"), "ALREADY_EXISTS", "REPLICA_EXISTS")
        closed = engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, epoch=4, lend_id="l"))
        await refused(closed, "FAILED_PRECONDITION", "LEND_CLOSED")


async def test_a_lend_goes_on_over_a_restart(tmp_path: Path) -> None:
    """The trainer is computing without its lent GPUs meanwhile: they must go on generating."""
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await with_replicas(engine)
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, epoch=4, lend_id="l"))
        await update(engine, role("hybrid"), 0, "ASLEEP", epoch=4)
        await engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, epoch=4, lend_id="l", weight_version=0))
    async with engines.controlled(tmp_path) as engine:
        now = await replicas(engine)
        assert {(r.route, r.lend_id) for name, r in now.items() if name != "s0"} == {(pb.ROUTE_STATE_SERVING, "l")}
        outputs = await asyncio.gather(*(generate(engine, f"r{i}", (i,), max_tokens=5) for i in range(6)))
        assert {output.segments[0].replica_id for output in outputs} == {"h0", "h1", "s0"}
        other = engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, epoch=4, lend_id="other"))
        await refused(other, "FAILED_PRECONDITION", "LEND_OPEN")
        await engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN, epoch=4))
        assert (await replicas(engine))["h0"].confirmed_free


async def test_answers_and_what_is_left_of_operations_survive(tmp_path: Path) -> None:
    """A client repeats its call after a restart as it does after a lost reply."""
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await with_replicas(engine)
        pause = pb.PauseRequest(run_id=RUN, epoch=4, selector=only("s0"), request_id="pause")
        first = await engine.stub.Pause(pause)
        slot = engine.controller.fleet.get("h1")
        recorder: Any = slot.backend
        recorder.faults["sleep(2)"] = [internal("BROKEN", "no")]
        outcomes = await partial(engine, engine.stub.Sleep(SLEEP), "FAILED_PRECONDITION")
        assert [outcomes[r].kind for r in ("h0", "h1")] == [pb.OUTCOME_KIND_DONE, pb.OUTCOME_KIND_FAILED]
        (operation_id,) = [op.operation_id for op in engine.controller.operations.all if op.kind == "Sleep"]
    async with engines.controlled(tmp_path) as engine:
        engines.journal.clear()
        assert await engine.stub.Pause(pause) == first
        assert engines.journal == []
        read = pb.GetOperationRequest(run_id=RUN, operation_id=operation_id)
        assert (await engine.stub.GetOperation(read)).operation.state == pb.OPERATION_STATE_PARTIAL
        done = await engine.stub.Sleep(SLEEP)
        assert done.operation.operation_id == operation_id
        assert set(kinds(done.operation).values()) == {"DONE", "SKIPPED"}
        assert {replica for replica, _ in engines.journal} == {"h1"}
        page = await engine.stub.ListOperations(pb.ListOperationsRequest(run_id=RUN))
        assert [operation.kind for operation in page.operations] == ["Sleep", "Pause"]
        resume = await engine.stub.Resume(pb.ResumeRequest(run_id=RUN, epoch=4, selector=only("s0")))
        # Numbers go on, so that pages stay in order.
        assert int(resume.operation.operation_id.rpartition("-")[2]) == 3
        other = pb.PauseRequest(run_id=RUN, epoch=4, selector=only("h0"), request_id="pause")
        await refused(engine.stub.Pause(other), "INVALID_ARGUMENT", "REQUEST_ID_REUSED")


async def test_h50_an_operation_that_a_stop_cuts_is_recorded_as_partial(tmp_path: Path) -> None:
    """SIGTERM comes in the middle of a fan-out: afterwards it is known which replica did it and which may have."""
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await with_replicas(engine)
        recorder: Any = engine.controller.fleet.get("h1").backend
        recorder.faults["sleep(2)"] = [asyncio.Event()]
        call = asyncio.ensure_future(error_of(engine.stub.Sleep(SLEEP)))
        await until(lambda: ("h1", "sleep(2)") in engines.journal)
        operation = next(op for op in engine.controller.operations.all if op.kind == "Sleep")
        await until(lambda: operation.outcomes["h0"].kind.value == "done")
        await engine.host.stop()
        assert (await call).code.name in ("UNAVAILABLE", "CANCELLED")
    async with engines.controlled(tmp_path) as engine:
        read = pb.GetOperationRequest(run_id=RUN, operation_id=operation.operation_id)
        told = (await engine.stub.GetOperation(read)).operation
        assert told.state == pb.OPERATION_STATE_PARTIAL
        outcomes = {outcome.replica_id: outcome for outcome in told.outcomes}
        assert outcomes["h0"].kind == pb.OUTCOME_KIND_DONE
        assert (outcomes["h1"].kind, outcomes["h1"].reason) == (pb.OUTCOME_KIND_FAILED, "INTERRUPTED")
        assert set(kinds((await engine.stub.Sleep(SLEEP)).operation).values()) == {"DONE", "SKIPPED"}


async def test_h38_an_engine_that_was_replaced_meanwhile_must_be_updated(tmp_path: Path) -> None:
    """Restarted with old weights while nobody looked: it answers, and must not serve."""
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await with_replicas(engine)
        await update(engine, role("standalone"), 7, epoch=4)
    engines.by_id.clear()
    async with engines.controlled(tmp_path) as engine:
        state = (await replicas(engine))["s0"]
        assert (state.health, state.route) == (pb.REPLICA_HEALTH_HEALTHY, pb.ROUTE_STATE_OUT)
        assert state.weights == pb.WEIGHTS_STATE_DISCARDED
        resume = pb.ResumeRequest(run_id=RUN, epoch=4, selector=only("s0"))
        await partial(engine, engine.stub.Resume(resume), "FAILED_PRECONDITION")
    # Told by the journal alone now: the engine is the one that was seen last.
    async with engines.controlled(tmp_path) as engine:
        assert (await replicas(engine))["s0"].route == pb.ROUTE_STATE_OUT
        await update(engine, role("standalone"), 8, epoch=4)
        assert (await replicas(engine))["s0"].route == pb.ROUTE_STATE_SERVING


async def test_h38_an_engine_that_cannot_be_opened_again_is_out_and_comes_back_by_itself(tmp_path: Path) -> None:
    """A node that is away must not keep the controller from starting, and is tried again."""
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await with_replicas(engine)
    away = engines.unreachable
    away.add("s0")
    async with engines.controlled(tmp_path, probe_interval=0.05) as engine:
        now = await replicas(engine)
        assert (now["s0"].health, now["s0"].route) == (pb.REPLICA_HEALTH_UNRESPONSIVE, pb.ROUTE_STATE_OUT)
        assert now["h0"].health == pb.REPLICA_HEALTH_HEALTHY
        pause = pb.PauseRequest(run_id=RUN, epoch=4, selector=only("s0"))
        outcomes = await partial(engine, engine.stub.Pause(pause), "UNAVAILABLE")
        assert outcomes["s0"].reason == "ENGINE_UNREACHABLE"
        away.clear()

        async def serves() -> bool:
            return (await replicas(engine))["s0"].route == pb.ROUTE_STATE_SERVING

        await until(serves)


@pytest.mark.parametrize("how", ["nonsense", "broken file"])
async def test_a_damaged_journal_is_data_loss_and_nothing_is_served(tmp_path: Path, how: str) -> None:
    """Beginning anew would lend GPUs twice and forget which weights are half there."""
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await with_replicas(engine)
    if how == "nonsense":
        journal = await opened(tmp_path / "journal", schema=SCHEMA)
        good = journal.position
        await journal.append("engine", b"\xff nonsense")
        await journal.close()
        expected = rf"DATA_LOSS.*the last good position is {good}"
    else:
        await asyncio.to_thread(_break, tmp_path / "journal" / "journal.db")
        expected = "DATA_LOSS.*last good position"
    with pytest.raises(StartError, match=expected):
        async with engines.controlled(tmp_path):
            pass


def _break(database: Path) -> None:
    connection = sqlite3.connect(database)
    (table,) = [
        name
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        if "body" in [column[1] for column in connection.execute(f"PRAGMA table_info({name})")]
    ]
    connection.execute(
        f"UPDATE {table} SET body = zeroblob(length(body)) WHERE rowid = (SELECT MIN(rowid) FROM {table})"
    )
    connection.commit()
    connection.close()


async def test_two_controllers_never_share_a_directory_and_none_takes_that_of_another_run(tmp_path: Path) -> None:
    """Each would undo what the other does."""
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await with_replicas(engine)
        with pytest.raises(StartError, match="JOURNAL_LOCKED"):
            async with Engines().controlled(tmp_path):
                pass
    with pytest.raises(StartError, match="RUN_BOUND"):
        async with engines.controlled(tmp_path, run="another"):
            pass
    with pytest.raises(StartError, match="JOURNAL_PRESENT"):
        async with engines.controlled(tmp_path, durability="none"):
            pass
    buffer = await open_journal(tmp_path / "other" / "journal", schema="buffer/1")
    await buffer.append("run", b"x")
    await buffer.close()
    with pytest.raises(StartError, match="JOURNAL_FORMAT"):
        async with engines.controlled(tmp_path / "other"):
            pass


async def test_snapshots_stand_for_the_records_before_them(tmp_path: Path) -> None:
    """A controller switches for weeks: what it reads at its next start must not grow with that."""
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await with_replicas(engine)
        for _ in range(20):
            await engine.stub.Pause(pb.PauseRequest(run_id=RUN, epoch=4))
            await engine.stub.Resume(pb.ResumeRequest(run_id=RUN, epoch=4, selector=only("s0")))
        await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="h1"))
        await keeper_of(engine).snapshot()
        await engine.stub.Resume(pb.ResumeRequest(run_id=RUN, epoch=4, selector=only("h0"), request_id="last"))
        before = await replicas(engine)
        operations = await engine.stub.ListOperations(pb.ListOperationsRequest(run_id=RUN))
    journal = await opened(tmp_path / "journal", schema=SCHEMA)
    assert len(await records_of(journal)) < 12
    await journal.close()
    async with engines.controlled(tmp_path) as engine:
        assert await replicas(engine) == before
        assert await engine.stub.ListOperations(pb.ListOperationsRequest(run_id=RUN)) == operations
        assert set(before) == {"h0", "s0"}


async def test_while_nothing_can_be_stored_no_engine_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails and comes back: what was refused did not happen, what happened is stored after all."""
    faults = Faults()
    monkeypatch.setattr(keeper, "open_journal", bind(open_journal, seams=faults.seams()))
    monkeypatch.setattr(mending, "RETRY_S", 0.02)
    engines = Engines()
    async with engines.controlled(tmp_path) as engine:
        await with_replicas(engine)
        engines.journal.clear()
        faults.fail("", sqlite3.SQLITE_IOERR_WRITE)
        error = await error_of(engine.stub.Pause(pb.PauseRequest(run_id=RUN, epoch=4)))
        assert error.code.name == "UNAVAILABLE"
        assert engines.journal == []

        async def out_of_service() -> bool:
            return not await serving(engine)

        await until(out_of_service)
        await engine.controller.deregister("h1")
        faults.heal()
        await until(lambda: serving(engine))
        await engine.stub.Pause(pb.PauseRequest(run_id=RUN, epoch=4))
        before = await replicas(engine)
    monkeypatch.undo()
    async with engines.controlled(tmp_path) as engine:
        assert await replicas(engine) == before
        assert set(before) == {"h0", "s0"}


async def test_h60_loops_of_the_controller_outlive_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prober that is gone leaves a dead replica serving; a compaction that is gone fills the disk."""
    engines = Engines()
    snapshots = 0

    async def fails_once(self: Keeper) -> None:
        nonlocal snapshots
        snapshots += 1
        if snapshots == 1:
            raise ValueError("injected")

    monkeypatch.setattr(Keeper, "snapshot", fails_once)
    monkeypatch.setattr(Keeper, "_log_is_long", lambda _: True)
    async with engines.controlled(tmp_path, probe_interval=0.05) as engine:
        await with_replicas(engine)
        probed = asyncio.Event()
        slot = engine.controller.fleet.get("s0")

        async def breaks() -> None:
            del slot.probe_in_background
            probed.set()
            raise ValueError("injected")

        slot.probe_in_background = breaks  # type: ignore[method-assign]
        await probed.wait()
        with pytest.raises(TurnoutError):
            engines.by_id["s0"]._die("injected")

        async def dead() -> bool:
            return (await replicas(engine))["s0"].health == pb.REPLICA_HEALTH_DEAD

        await until(dead)
        for wanted in (1, 2):
            engine.controller.book.compaction_due.set()
            await until(lambda wanted=wanted: snapshots == wanted)  # type: ignore[misc]
        status = {loop.name: loop for loop in engine.controller.context.tasks.status()}
        assert status["engine compaction"].restarts == 1
        assert status["engine journal"].running


async def test_no_snapshot_is_taken_of_a_log_that_is_short_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All through a snapshot the log is as long as before it, so each was followed at once by a second one."""
    taken: list[Keeper] = []

    async def snapshot(self: Keeper) -> None:
        taken.append(self)

    monkeypatch.setattr(Keeper, "snapshot", snapshot)
    async with Engines().controlled(tmp_path) as engine:
        await with_replicas(engine)
        journal, due = keeper_of(engine).journal, engine.controller.book.compaction_due
        assert journal is not None
        assert not journal.compaction_due
        due.set()
        # A snapshot begins in the turn in which that is taken up.
        await until(lambda: not due.is_set())
        assert not taken


async def test_an_agent_keeps_nothing(tmp_path: Path) -> None:
    """Its engines end with it; a journal of them would be believed."""
    with pytest.raises(ValueError, match="an agent keeps nothing"):
        async with running(data_dir=tmp_path, agent=True):
            pass
    with pytest.raises(ValueError, match="needs a data_dir"):
        async with running(durability="fsync"):
            pass
