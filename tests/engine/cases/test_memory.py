"""Cases H25 to H28: memory that is freed and refilled under a running engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.engine.backends.base import engine_dead
from tests.engine.helpers import (
    RUN,
    Engine,
    generate,
    kinds,
    only,
    partial,
    refused,
    replicas,
    seconds,
    until,
)
from tests.engine.recorder import recorded, requests_running
from turnout.engine.v1 import engine_pb2 as pb


def sleep(engine: Engine, level: int = 0, mode: str = "ABORT", **fields: Any) -> Any:
    """A Sleep call; level 0 is AUTO."""
    return engine.stub.Sleep(
        pb.SleepRequest(
            run_id=RUN,
            level=[pb.SLEEP_LEVEL_AUTO, pb.SLEEP_LEVEL_ONE, pb.SLEEP_LEVEL_TWO][level],
            mode=pb.PauseMode.Value(f"PAUSE_MODE_{mode}"),
            **fields,
        )
    )


def wake(engine: Engine, *tags: str, all_tags: bool = False) -> Any:
    """A WakeUp call."""
    return engine.stub.WakeUp(pb.WakeUpRequest(run_id=RUN, tags=None if all_tags else pb.TagList(tags=tags)))


def resume(engine: Engine) -> Any:
    """A Resume call."""
    return engine.stub.Resume(pb.ResumeRequest(run_id=RUN))


async def test_h25_sleep_pauses_and_drains_before_memory_goes() -> None:
    """A sleep that freed memory under running requests crashed the engine while its caller was told success."""
    async with recorded("c0:colocated", scale=1.0) as (engine, recorders), requests_running(engine, 5):
        recorders.forget()
        answer = await sleep(engine)
        assert kinds(answer.operation) == {"c0": "DONE"}
        assert answer.operation.outcomes[0].bytes_freed == 2 << 16
        assert recorders["c0"].calls[0] == "pause(abort)"
        assert recorders["c0"].calls[-1] == "sleep(1)"
        state = (await replicas(engine))["c0"]
        assert (state.health, list(state.resident_tags)) == (pb.REPLICA_HEALTH_HEALTHY, [])
        assert (state.running, state.parked) == (0, 5)


async def test_h25_sleep_in_mode_wait_lets_requests_end() -> None:
    """Mode wait promises that the requests finish first."""
    async with (
        recorded("c0:colocated", scale=0.4) as (engine, recorders),
        requests_running(engine, 5, max_tokens=150) as tasks,
    ):
        await sleep(engine, mode="WAIT")
        outputs = await asyncio.gather(*tasks)
        assert {(len(output.tokens), output.finish) for output in outputs} == {(150, "LENGTH")}
        assert "pause(wait)" in recorders["c0"].calls


async def test_h25_sleep_in_mode_wait_that_runs_out_of_time_frees_nothing() -> None:
    """A deadline that passes while requests run must not free memory under them."""
    async with recorded("c0:colocated", scale=1.0) as (engine, recorders), requests_running(engine, 5):
        outcomes = await partial(engine, sleep(engine, mode="WAIT", timeout=seconds(0.3)), "DEADLINE_EXCEEDED")
        assert outcomes["c0"].reason == "ENGINE_TIMEOUT"
        assert not any(call.startswith("sleep") for call in recorders["c0"].calls)
        assert len((await replicas(engine))["c0"].resident_tags) == 2


async def test_h25_sleep_in_mode_keep_is_refused() -> None:
    """Kept requests would wake up over memory that is gone."""
    async with recorded("c0:colocated") as (engine, recorders):
        error = await refused(sleep(engine, mode="KEEP"), "INVALID_ARGUMENT", "INVALID_ARGUMENT")
        assert error.metadata["field"] == "mode"
        assert recorders["c0"].calls == []


async def test_h25_an_engine_that_dies_while_it_falls_asleep_is_no_success() -> None:
    """The crash was reported as success."""
    async with recorded("c0:colocated") as (engine, recorders):
        recorders["c0"].faults = {"sleep(1)": [engine_dead("crashed")], "probe": []}
        recorders["c0"].faults["sleep(1)"].append(engine_dead("crashed"))
        call = sleep(engine)
        recorders["c0"].engine._fail_all("crashed")
        outcomes = await partial(engine, call, "UNAVAILABLE")
        assert outcomes["c0"].reason == "ENGINE_DEAD"
        assert (await replicas(engine))["c0"].health == pb.REPLICA_HEALTH_DEAD


async def test_h26_nothing_reaches_a_sleeping_engine() -> None:
    """A request that reached a sleeping server crashed it; here it waits until the replica serves again."""
    async with recorded("c0:colocated", "h0:hybrid", allow_method=["weight_checksum"]) as (engine, recorders):
        await sleep(engine, level=1)
        waiting = asyncio.create_task(generate(engine, "early", max_tokens=10))
        await until(lambda: engine.controller.fleet.placement.load("c0") == 1)
        recorders.forget()
        assert kinds((await sleep(engine, level=1)).operation) == {"c0": "SKIPPED", "h0": "SKIPPED"}
        outcomes = await partial(engine, sleep(engine, level=2, selector=only("h0")), "FAILED_PRECONDITION")
        assert outcomes["h0"].reason == "ASLEEP_AT_OTHER_LEVEL"
        call = engine.stub.CollectiveRpc(pb.CollectiveRpcRequest(run_id=RUN, method="weight_checksum"))
        assert {o.reason for o in (await partial(engine, call, "FAILED_PRECONDITION")).values()} == {"TAG_ASLEEP"}
        await engine.stub.Pause(pb.PauseRequest(run_id=RUN))
        assert recorders.journal == []
        await engine.stub.ResetCaches(pb.ResetCachesRequest(run_id=RUN))
        await engine.stub.Abort(pb.AbortRequest(run_id=RUN, request_ids=["nobody"]))
        assert {replica.health for replica in (await replicas(engine)).values()} == {pb.REPLICA_HEALTH_HEALTHY}
        assert ("c0", "generate") not in recorders.journal
        await wake(engine, all_tags=True)
        await resume(engine)
        assert (await waiting).placed == ["c0 parked", "c0"]


async def test_h27_wake_up_wakes_what_is_asleep_and_nothing_else() -> None:
    """One tag that was awake, or unknown, made the whole call do nothing; a repeat mapped live memory again."""
    async with recorded("h0:hybrid") as (engine, recorders):
        await sleep(engine, level=1)
        await wake(engine, "kv_cache")
        recorders.forget()
        await wake(engine, "weights", "kv_cache", "weights")
        assert recorders["h0"].calls == ["wake_up(weights)", "reset(prefix)"]
        recorders.forget()
        assert kinds((await wake(engine, "weights")).operation) == {"h0": "SKIPPED"}
        assert recorders["h0"].calls == []


@pytest.mark.parametrize("tags", [("bogus",), ("weights", "bogus"), ("Weights",), (" weights",), ("weights ",)])
async def test_h27_an_unknown_tag_wakes_nothing(tags: tuple[str, ...]) -> None:
    """The engine would ignore the whole call without a word."""
    async with recorded("h0:hybrid") as (engine, recorders):
        await sleep(engine, level=1)
        recorders.forget()
        error = await refused(wake(engine, *tags), "INVALID_ARGUMENT", "UNKNOWN_TAG")
        assert error.metadata["value"] == tags[-1]
        assert recorders["h0"].calls == []
        assert not (await replicas(engine))["h0"].resident_tags


async def test_h27_no_tags_differ_from_all_tags() -> None:
    """An empty list meant nothing to the engine and everything to its caller."""
    async with recorded("h0:hybrid") as (engine, _):
        await sleep(engine, level=1)
        await refused(wake(engine), "INVALID_ARGUMENT", "EMPTY_TAGS")
        await wake(engine, all_tags=True)
        assert list((await replicas(engine))["h0"].resident_tags) == ["kv_cache", "weights"]


async def test_h27_concurrent_wakes_wake_each_tag_once() -> None:
    """Waking twice mapped live memory twice."""
    async with recorded("h0:hybrid", "h1:hybrid") as (engine, recorders):
        await sleep(engine, level=1)
        recorders.forget()
        await asyncio.gather(*(wake(engine, all_tags=True) for _ in range(20)))
        for recorder in recorders.by_id.values():
            assert recorder.calls == ["wake_up(kv_cache,weights)", "reset(prefix)"]


async def test_h28_level_two_without_a_load_never_serves() -> None:
    """Waking from level 2 gives garbage and no error."""
    async with recorded("h0:hybrid", allow_method=["reload_weights"]) as (engine, _):
        await sleep(engine, level=2)
        reload_call = pb.CollectiveRpcRequest(run_id=RUN, method="reload_weights")
        outcomes = await partial(engine, engine.stub.CollectiveRpc(reload_call), "FAILED_PRECONDITION")
        assert outcomes["h0"].reason == "TAG_ASLEEP"
        await wake(engine, all_tags=True)
        assert (await replicas(engine))["h0"].weights == pb.WEIGHTS_STATE_DISCARDED
        outcomes = await partial(engine, resume(engine), "FAILED_PRECONDITION")
        assert outcomes["h0"].reason == "WEIGHTS_DISCARDED"
        await engine.stub.CollectiveRpc(reload_call)
        assert (await replicas(engine))["h0"].weights == pb.WEIGHTS_STATE_INTACT
        await resume(engine)


async def test_h28_level_one_needs_no_load() -> None:
    """Asking for weights that are there would cost a transfer at each wake."""
    async with recorded("h0:hybrid") as (engine, _):
        await sleep(engine, level=1)
        await wake(engine, all_tags=True)
        await resume(engine)
        assert (await replicas(engine))["h0"].weights == pb.WEIGHTS_STATE_INTACT
