"""Cases H32 to H34: calls that race, miss a shard, or fail on one replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.engine.backends.base import engine_dead
from services.runtime.errors import internal, unavailable
from tests.engine.helpers import (
    RUN,
    Engine,
    generate,
    kinds,
    lend,
    partial,
    replicas,
    seconds,
    until,
)
from tests.engine.recorder import Recorder, Recorders, recorded
from turnout.engine.v1 import engine_pb2 as pb

FOUR = ("h1:hybrid", "h2:hybrid", "h3:hybrid", "h4:hybrid")
OTHERS = {"h1", "h2", "h4"}


def sleep(engine: Engine, **fields: Any) -> Any:
    """A Sleep call at level 2."""
    return engine.stub.Sleep(pb.SleepRequest(run_id=RUN, level=pb.SLEEP_LEVEL_TWO, **fields))


@pytest.mark.parametrize("starts_by_itself", [True, False])
async def test_h32_racing_wakes_and_resumes_reach_the_engine_once(starts_by_itself: bool) -> None:
    """An implicit and an explicit resume raced with new requests, and ranks diverged."""
    async with recorded("h0:hybrid", "h1:hybrid") as (engine, recorders):
        await lend(engine, "l", 0)
        await engine.stub.Pause(pb.PauseRequest(run_id=RUN))
        await engine.stub.ReleaseKvCache(pb.ReleaseKvCacheRequest(run_id=RUN))
        if not starts_by_itself:
            for recorder in recorders.by_id.values():
                _wait_for_resume(recorder)
        queued = [asyncio.create_task(generate(engine, f"q{i}", (i,), max_tokens=4)) for i in range(200)]
        await until(lambda: sum(engine.controller.fleet.placement.load(h) for h in ("h0", "h1")) == 200)
        recorders.forget()
        wake = pb.WakeUpRequest(run_id=RUN, tags=pb.TagList(tags=["kv_cache"]))
        # A resume that comes before any wake is refused, so the first wake is under way when the others arrive.
        gate = asyncio.Event()
        for recorder in recorders.by_id.values():
            recorder.faults["wake_up(kv_cache)"] = [gate]
        calls: list[Any] = [engine.stub.WakeUp(wake)]
        await until(lambda: all(recorder.calls for recorder in recorders.by_id.values()))
        calls += [engine.stub.WakeUp(wake) for _ in range(24)]
        calls += [engine.stub.Resume(pb.ResumeRequest(run_id=RUN)) for _ in range(25)]
        await until(lambda: operations_running(engine) == 50)
        gate.set()
        await asyncio.gather(*calls)
        for replica_id, recorder in recorders.by_id.items():
            assert recorder.calls.count("wake_up(kv_cache)") == 1
            assert recorder.calls.count("resume") == (0 if starts_by_itself else 1)
            own = [name for known, name in recorders.journal if known == replica_id]
            assert "generate" not in own[: own.index("reset(prefix)")]
        assert {len((await task).tokens) for task in queued} == {4}


def operations_running(engine: Engine) -> int:
    """Operations under way."""
    page, _ = engine.controller.operations.page(1000, "")
    return sum(operation.duration is None for operation in page)


def _wait_for_resume(recorder: Recorder) -> None:
    """Make the engine one that does not start by itself when all its memory is back."""

    def refill(tags: frozenset[str]) -> None:
        for memory in recorder.engine._shards:
            memory.wake(tags)

    recorder.engine._refill = refill  # type: ignore[method-assign]


async def test_h33_a_broadcast_reaches_every_shard() -> None:
    """A worker-level call reached one data-parallel shard; the others kept their memory and training ran out of it."""
    fields = {"shards": 2}
    async with recorded(*FOUR, spec_fields=fields, allow_method=["weight_checksum"]) as (engine, recorders):
        call = pb.CollectiveRpcRequest(run_id=RUN, method="weight_checksum")
        answer = await engine.stub.CollectiveRpc(call)
        assert [[s.shard for s in o.shards] for o in answer.operation.outcomes] == [[0, 1]] * 4
        call.shard = 1
        answer = await engine.stub.CollectiveRpc(call)
        assert [[s.shard for s in o.shards] for o in answer.operation.outcomes] == [[1]] * 4
        answer = await sleep(engine)
        assert [[s.shard for s in o.shards if s.ok] for o in answer.operation.outcomes] == [[0, 1]] * 4
        assert {m.size for r in recorders.by_id.values() for m in r.engine._shards} == {0}


async def test_h33_partial_reach_is_never_success() -> None:
    """Missing one shard of eight looks like success unless somebody counts."""
    async with recorded(*FOUR, spec_fields={"shards": 2}) as (engine, recorders):
        recorders["h3"].shards_reached = 1
        outcomes = await partial(engine, sleep(engine), "ABORTED")
        assert {key: o.reason for key, o in outcomes.items() if o.code} == {"h3": "SHARDS_MISSED"}
        assert len(outcomes["h3"].shards) == 1


@pytest.mark.parametrize("how", ["raises", "hangs", "dies", "reply lost"])
async def test_h34_one_of_four_fails_to_sleep(how: str) -> None:
    """One rank that failed left a fleet in mixed state which was reported as asleep."""
    async with recorded(*FOUR, probe_timeout=0.5) as (engine, recorders):
        broken = recorders["h3"]
        hang = asyncio.Event()
        match how:
            case "raises":
                broken.faults["sleep(2)"] = [internal("ENGINE_FAILED", "out of luck")]
                code, reason = "FAILED_PRECONDITION", "ENGINE_FAILED"
            case "hangs":
                broken.faults["sleep(2)"] = [hang]
                code, reason = "DEADLINE_EXCEEDED", "ENGINE_TIMEOUT"
            case "dies":
                broken.faults["pause(abort)"] = [engine_dead("killed")]
                broken.faults["probe"] = [engine_dead("killed")]
                code, reason = "UNAVAILABLE", "ENGINE_DEAD"
            case _:
                broken.lost["sleep(2)"] = unavailable("UNAVAILABLE", "connection reset")
                code, reason = "UNAVAILABLE", "UNAVAILABLE"
        outcomes = await partial(engine, sleep(engine, timeout=seconds(0.5)), code)
        assert outcomes["h3"].reason == reason
        assert {key for key, o in outcomes.items() if o.kind == pb.OUTCOME_KIND_DONE} == OTHERS
        if how != "reply lost":
            assert not (await replicas(engine))["h3"].confirmed_free
        await _retry(engine, recorders, how, hang)


async def _retry(engine: Engine, recorders: Recorders, how: str, hang: asyncio.Event) -> None:
    recorders.forget()
    if how == "dies":
        outcomes = await partial(engine, sleep(engine), "UNAVAILABLE")
        assert {key for key, o in outcomes.items() if o.code} == {"h3"}
        assert recorders.journal == []
        return
    if how == "hangs":
        # A later call does not overtake the one that still hangs in the engine.
        outcomes = await partial(engine, sleep(engine, timeout=seconds(0.2)), "DEADLINE_EXCEEDED")
        assert outcomes["h3"].reason == "REPLICA_BUSY"
        hang.set()
    answer = await sleep(engine)
    assert {key for key, kind in kinds(answer.operation).items() if kind == "SKIPPED"} >= OTHERS
    assert {replica_id for replica_id, _ in recorders.journal} <= {"h3"}
    if how == "raises":
        assert ("h3", "sleep(2)") in recorders.journal
    else:
        assert ("h3", "sleep(2)") not in recorders.journal
    assert all(replica.confirmed_free for replica in (await replicas(engine)).values())
    answer = await engine.stub.WakeUp(pb.WakeUpRequest(run_id=RUN))
    assert set(kinds(answer.operation).values()) == {"DONE"}
