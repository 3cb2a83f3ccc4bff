"""Cases H29 to H31: caches and weights that do not belong together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.engine.domain.spec import Weights
from services.runtime.errors import failed_precondition
from tests.engine.helpers import (
    RUN,
    WEIGHTS,
    Engine,
    error_of,
    generate,
    kinds,
    lend,
    only,
    partial,
    refused,
    replicas,
    role,
    update,
)
from tests.engine.recorder import recorded, requests_running
from turnout.engine.v1 import engine_pb2 as pb

FOUR = ("s1:standalone", "s2:standalone", "s3:standalone", "s4:standalone")
ALL_RESET = "reset(encoder,multimodal,prefix)"


def reset(engine: Engine, **fields: Any) -> Any:
    """A ResetCaches call."""
    return engine.stub.ResetCaches(pb.ResetCachesRequest(run_id=RUN, **fields))


def begin(engine: Engine, version: int = 1, **fields: Any) -> Any:
    """A BeginWeightUpdate call."""
    return engine.stub.BeginWeightUpdate(pb.BeginWeightUpdateRequest(run_id=RUN, weight_version=version, **fields))


async def test_h29_a_reset_that_answers_false_is_no_success() -> None:
    """Users kept stale caches because the endpoint said success."""
    async with recorded(*FOUR) as (engine, recorders):
        busy = failed_precondition("CACHE_BUSY", "blocks in use")
        recorders["s2"].faults[ALL_RESET] = [busy, busy]
        outcomes = await partial(engine, reset(engine), "FAILED_PRECONDITION")
        assert {key: pb.OutcomeKind.Name(o.kind)[13:] for key, o in outcomes.items()} == {
            "s1": "DONE",
            "s2": "FAILED",
            "s3": "DONE",
            "s4": "DONE",
        }
        recorders.forget()
        left = [key for key, outcome in outcomes.items() if outcome.reason == "CACHE_BUSY"]
        await partial(engine, reset(engine, selector=only(*left)), "FAILED_PRECONDITION")
        await reset(engine, selector=only(*left))
        assert recorders.journal == [("s2", ALL_RESET)] * 2


async def test_h29_running_requests_give_up_their_blocks_and_go_on() -> None:
    """A busy engine has two honest answers: false, or a reset that recomputes the requests."""
    async with recorded("s1:standalone", scale=0.3) as (engine, _), requests_running(engine, 2, max_tokens=300) as r:
        outcomes = await partial(engine, reset(engine), "FAILED_PRECONDITION")
        assert outcomes["s1"].reason == "CACHE_BUSY"
        await reset(engine, reset_running_requests=True)
        assert {len((await task).tokens) for task in r} == {300}


@pytest.mark.parametrize("where", ["commit", "finish"])
async def test_h29_a_switch_whose_reset_fails_does_not_serve(where: str) -> None:
    """A reset inside a transition must not be forgotten either."""
    async with recorded("h0:hybrid", "h1:hybrid") as (engine, recorders):
        busy = failed_precondition("CACHE_BUSY", "blocks in use")
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        if where == "commit":
            recorders["h1"].faults[ALL_RESET] = [busy]
            await partial(engine, update(engine, role("hybrid"), 1, "ASLEEP"), "FAILED_PRECONDITION")
            assert (await replicas(engine))["h1"].cache_version == 0
            assert (await replicas(engine))["h1"].route != pb.ROUTE_STATE_SERVING
            return
        await update(engine, role("hybrid"), 1, "ASLEEP")
        recorders["h1"].faults[ALL_RESET] = [busy]
        finish = pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=1)
        await partial(engine, engine.stub.FinishLend(finish), "FAILED_PRECONDITION")
        now = await replicas(engine)
        assert (now["h0"].route, now["h1"].route) == (pb.ROUTE_STATE_SERVING, pb.ROUTE_STATE_OUT)
        recorders.forget()
        assert kinds((await engine.stub.FinishLend(finish)).operation) == {"h0": "SKIPPED", "h1": "DONE"}
        assert {replica_id for replica_id, _ in recorders.journal} == {"h1"}


async def test_h30_new_weights_over_old_caches_do_not_serve() -> None:
    """Outputs mixed two policies because weights changed and cached prefixes did not."""
    async with recorded(*FOUR, allow_method=["weight_checksum"]) as (engine, recorders):
        await engine.stub.Pause(pb.PauseRequest(run_id=RUN))
        for recorder in recorders.by_id.values():
            # What a trainer's own worker does to an engine, past the controller.
            recorder.engine._change_weights(Weights.INTACT, 8)
        await engine.stub.CollectiveRpc(pb.CollectiveRpcRequest(run_id=RUN, method="weight_checksum"))
        now = await replicas(engine)
        assert {(r.weight_version, r.cache_version) for r in now.values()} == {(8, 0)}
        outcomes = await partial(engine, engine.stub.Resume(pb.ResumeRequest(run_id=RUN)), "FAILED_PRECONDITION")
        assert {outcome.reason for outcome in outcomes.values()} == {"CACHE_OLDER_THAN_WEIGHTS"}
        recorders["s3"].faults[ALL_RESET] = [failed_precondition("CACHE_BUSY", "blocks in use")]
        await partial(engine, reset(engine), "FAILED_PRECONDITION")
        outcomes = await partial(engine, engine.stub.Resume(pb.ResumeRequest(run_id=RUN)), "FAILED_PRECONDITION")
        assert {key for key, outcome in outcomes.items() if outcome.code} == {"s3"}
        now = await replicas(engine)
        assert {key for key, r in now.items() if r.route == pb.ROUTE_STATE_SERVING} == {"s1", "s2", "s4"}
        assert {(r.weight_version, r.cache_version) for key, r in now.items() if key != "s3"} == {(8, 8)}


@pytest.mark.parametrize("level", [pb.SLEEP_LEVEL_ONE, pb.SLEEP_LEVEL_TWO])
async def test_h31_no_update_of_sleeping_weights(level: pb.SleepLevel.ValueType) -> None:
    """Writing to unmapped memory killed the engine, and the trainer only saw a time-out."""
    async with recorded("h0:hybrid") as (engine, recorders):
        await engine.stub.Sleep(pb.SleepRequest(run_id=RUN, level=level))
        await engine.stub.WakeUp(pb.WakeUpRequest(run_id=RUN, tags=pb.TagList(tags=["kv_cache"])))
        recorders.forget()
        outcomes = await partial(engine, begin(engine), "FAILED_PRECONDITION")
        assert outcomes["h0"].reason == "TAG_ASLEEP"
        assert recorders.journal == []


async def test_h31_no_sleep_during_an_update() -> None:
    """Sleeping between start and finish lost the weights that had come."""
    async with recorded("h0:hybrid") as (engine, _):
        begun = await begin(engine)
        outcomes = await partial(engine, engine.stub.Sleep(pb.SleepRequest(run_id=RUN)), "FAILED_PRECONDITION")
        assert outcomes["h0"].reason == "UPDATE_OPEN"
        await refused(begin(engine, 2), "FAILED_PRECONDITION", "UPDATE_OPEN")
        await engine.stub.AbortWeightUpdate(pb.AbortWeightUpdateRequest(run_id=RUN, update_id=begun.update_id))


async def test_h31_a_half_done_update_does_not_serve_until_a_full_one() -> None:
    """An update that failed on parameter 7 of 10 left a mixture that answered requests."""
    async with recorded("s0:standalone", "s1:standalone") as (engine, _):
        begun = await begin(engine, selector=only("s0"))

        async def torn() -> AsyncIterator[pb.UpdateWeightsRequest]:
            header = pb.UpdateWeightsHeader(run_id=RUN, update_id=begun.update_id, size=len(WEIGHTS))
            yield pb.UpdateWeightsRequest(header=header)
            yield pb.UpdateWeightsRequest(chunk=WEIGHTS[:700])

        await refused(engine.stub.UpdateWeights(torn()), "ABORTED", "WEIGHTS_INCOMPLETE")
        abort = pb.AbortWeightUpdateRequest(run_id=RUN, update_id=begun.update_id)
        assert list((await engine.stub.AbortWeightUpdate(abort)).half_updated) == ["s0"]
        state = (await replicas(engine))["s0"]
        assert (state.weights, state.route) == (pb.WEIGHTS_STATE_HALF_UPDATED, pb.ROUTE_STATE_OUT)
        assert {(await generate(engine, f"r{i}", max_tokens=5)).placed[0] for i in range(4)} == {"s1"}
        await update(engine, only("s0"), 1)
        assert (await replicas(engine))["s0"].route == pb.ROUTE_STATE_SERVING


async def test_h31_damaged_weights_are_not_stamped() -> None:
    """Bits that flipped on the way would train nobody knows what."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)

        async def damaged() -> AsyncIterator[pb.UpdateWeightsRequest]:
            header = pb.UpdateWeightsHeader(run_id=RUN, update_id=begun.update_id, size=3)
            yield pb.UpdateWeightsRequest(header=header)
            yield pb.UpdateWeightsRequest(chunk=b"abc")
            yield pb.UpdateWeightsRequest(end=pb.UpdateWeightsEnd(crc32c=1))

        error = await error_of(engine.stub.UpdateWeights(damaged()))
        assert (error.code.name, error.reason) == ("DATA_LOSS", "CRC_MISMATCH")
        assert (await replicas(engine))["s0"].weights == pb.WEIGHTS_STATE_HALF_UPDATED


async def test_h31_a_reclaim_in_the_middle_of_an_update_frees_the_gpus() -> None:
    """A trainer that wants its GPUs back must not wait for an update that nobody will finish."""
    async with recorded("h0:hybrid") as (engine, _):
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        begun = await begin(engine, kind=pb.UPDATE_KIND_ASLEEP)
        await engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN))
        assert (await replicas(engine))["h0"].confirmed_free
        commit = pb.CommitWeightUpdateRequest(run_id=RUN, update_id=begun.update_id)
        await refused(engine.stub.CommitWeightUpdate(commit), "FAILED_PRECONDITION", "UPDATE_CLOSED")
        await lend(engine, "l2", 1)
