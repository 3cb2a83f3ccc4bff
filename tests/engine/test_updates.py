"""Weight transactions: waves, words of the trainer, vacated GPUs, meetings."""

from __future__ import annotations

import asyncio
from typing import Any

import google_crc32c
import pytest

from services.runtime.errors import Code, internal
from tests.engine.helpers import (
    RUN,
    WEIGHTS,
    Engine,
    error_of,
    generate,
    kinds,
    move_weights,
    only,
    partial,
    refused,
    replicas,
    role,
    seconds,
    until,
    update,
    vacate,
)
from tests.engine.recorder import recorded, requests_running
from turnout.engine.v1 import engine_pb2 as pb

ALL_RESET = "reset(encoder,multimodal,prefix)"


async def begin(engine: Engine, version: int = 1, **fields: Any) -> pb.BeginWeightUpdateResponse:
    """Open a transaction."""
    request = pb.BeginWeightUpdateRequest(run_id=RUN, weight_version=version, **fields)
    return await engine.stub.BeginWeightUpdate(request)


def commit(engine: Engine, update_id: str, *acks: str, wave_index: int = 0, **checksums: str) -> Any:
    """A commit with these replicas acknowledged."""
    given = [pb.UpdateAck(replica_id=ack, ok=True, checksum=checksums.get(ack, "")) for ack in acks]
    request = pb.CommitWeightUpdateRequest(run_id=RUN, update_id=update_id, acks=given, wave_index=wave_index)
    return engine.stub.CommitWeightUpdate(request)


def abort(engine: Engine, update_id: str) -> Any:
    """An abort."""
    return engine.stub.AbortWeightUpdate(pb.AbortWeightUpdateRequest(run_id=RUN, update_id=update_id))


async def test_an_awake_update_in_order() -> None:
    """Pause, free KV, move, refill KV, reset, resume: any other order serves old caches or freed memory."""
    async with recorded("s0:standalone") as (engine, recorders):
        await update(engine, role("standalone"), 1)
        assert recorders["s0"].calls == [
            "pause(abort)",
            "release_kv_cache",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
            "resume_kv_cache",
            ALL_RESET,
        ]
        state = (await replicas(engine))["s0"]
        assert (state.route, state.weight_version, state.cache_version) == (pb.ROUTE_STATE_SERVING, 1, 1)


async def test_an_asleep_update_leaves_kv_asleep_until_the_trainer_has_left() -> None:
    """KV that comes back while the trainer still holds its memory runs out of it."""
    async with recorded("h0:hybrid", "h1:hybrid") as (engine, recorders):
        await engine.stub.Sleep(pb.SleepRequest(run_id=RUN))
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        recorders.forget()
        begun = await begin(engine, kind=pb.UPDATE_KIND_ASLEEP)
        assert [layout.ranks[0].gpu.uuid for layout in begun.wave] == ["gpu-h0", "gpu-h1"]
        await move_weights(engine, begun.update_id)
        assert (await commit(engine, begun.update_id, "h0", "h1")).complete
        assert not any("wake" in name for _, name in recorders.journal)
        finish = pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=1)
        outcomes = await partial(engine, engine.stub.FinishLend(finish), "FAILED_PRECONDITION")
        assert {outcome.reason for outcome in outcomes.values()} == {"NOT_VACATED"}
        one = pb.ReportVacatedRequest(
            run_id=RUN, update_id=begun.update_id, vacated=[pb.Vacated(gpu=pb.Gpu(node="n0", uuid="gpu-h0"))]
        )
        answer = await engine.stub.ReportVacated(one)
        assert [gpu.uuid for gpu in answer.missing] == ["gpu-h1"]
        outcomes = await partial(engine, engine.stub.FinishLend(finish), "FAILED_PRECONDITION")
        assert {key for key, outcome in outcomes.items() if outcome.code} == {"h1"}
        assert not (await vacate(engine, begun)).missing
        await engine.stub.FinishLend(finish)
        assert {r.route for r in (await replicas(engine)).values()} == {pb.ROUTE_STATE_SERVING}


async def test_a_wrong_version_does_not_serve() -> None:
    """A lend that finishes with last step's weights is off-policy without anybody knowing."""
    async with recorded("h0:hybrid") as (engine, _):
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        await update(engine, role("hybrid"), 3, "ASLEEP")
        finish = pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=4)
        outcomes = await partial(engine, engine.stub.FinishLend(finish), "FAILED_PRECONDITION")
        assert outcomes["h0"].reason == "VERSION_MISMATCH"


async def test_interrupted_requests_go_on_after_the_update() -> None:
    """An update must not cost a request more than a prefill."""
    async with (
        recorded("s0:standalone", scale=0.05) as (engine, _),
        requests_running(engine, 2, max_tokens=4000, sampling=pb.Sampling(seed=2)) as tasks,
    ):
        committed = await update(engine, role("standalone"), 1)
        assert committed.tokens_recomputed >= 4
        assert committed.blackout.ToMicroseconds() > 0
        outputs = [await task for task in tasks]
        whole = await generate(engine, "whole", (0, 7), max_tokens=4000, sampling=pb.Sampling(seed=2))
        assert outputs[0].tokens == whole.tokens
        for output in outputs:
            assert [segment.weight_version for segment in output.segments][-1] == 1
            assert sum(segment.tokens for segment in output.segments) == 4000


async def test_kept_requests_are_recomputed_under_the_new_weights() -> None:
    """They stay in the engine, and their segments tell which version made what."""
    async with (
        recorded("s0:standalone", scale=1.0) as (engine, recorders),
        requests_running(engine, 2) as tasks,
    ):
        batch = recorders["s0"].engine.batch
        streams = list(batch.streams)
        await until(lambda: min(batch.read().tokens().values()) > 0)
        await update(engine, role("standalone"), 1, in_flight=pb.IN_FLIGHT_KEEP_RECOMPUTE)
        assert list(batch.streams) == streams
        assert "pause(keep)" in recorders["s0"].calls
        under_old = batch.read().tokens()
        await until(lambda: all(count > under_old[key] for key, count in batch.read().tokens().items()))
        await engine.stub.Abort(pb.AbortRequest(run_id=RUN, all_requests=True))
        for task in tasks:
            output = await task
            assert sum(segment.tokens for segment in output.segments) == len(output.tokens)
            assert [segment.weight_version for segment in output.segments] == [0, 1]
            assert [segment.continued for segment in output.segments] == [True, False]


async def test_a_staggered_update_keeps_some_replicas_decoding() -> None:
    """All at once means nothing decodes for the length of a sync."""
    async with recorded("s0:standalone", "s1:standalone", "s2:standalone") as (engine, _):
        begun = await begin(engine, staggered=True)
        assert ([layout.replica_id for layout in begun.wave], list(begun.remaining)) == (["s0", "s1"], ["s2"])
        assert (await replicas(engine))["s2"].route == pb.ROUTE_STATE_SERVING
        assert (await generate(engine, "r", max_tokens=3)).placed
        await move_weights(engine, begun.update_id)
        first = await commit(engine, begun.update_id, "s0", "s1")
        assert (first.complete, [layout.replica_id for layout in first.wave]) == (False, ["s2"])
        now = await replicas(engine)
        assert [now[key].route for key in ("s0", "s1", "s2")] == [3, 3, pb.ROUTE_STATE_HELD]
        assert first.next_wave_index == 1
        stale = commit(engine, begun.update_id, "s2", wave_index=2)
        await refused(stale, "FAILED_PRECONDITION", "WAVE_NOT_OPEN")
        await refused(move_weights(engine, begun.update_id), "FAILED_PRECONDITION", "WAVE_NOT_OPEN")
        assert await commit(engine, begun.update_id, "s0", "s1") == first
        await move_weights(engine, begun.update_id, wave_index=1)
        wrong = commit(engine, begun.update_id, "s0", "s2", wave_index=1)
        await refused(wrong, "INVALID_ARGUMENT", "NOT_IN_WAVE")
        second = await commit(engine, begun.update_id, "s2", wave_index=1)
        assert await commit(engine, begun.update_id, "s2", wave_index=1) == second
        assert (second.complete, second.blackout.ToMicroseconds()) == (True, 0)
        assert {r.weight_version for r in (await replicas(engine)).values()} == {1}


async def test_a_replica_without_the_trainers_word_is_not_stamped() -> None:
    """Silence is not consent: weights that did not arrive must not serve under the new version."""
    async with recorded("s0:standalone", "s1:standalone") as (engine, recorders):
        begun = await begin(engine)
        await move_weights(engine, begun.update_id)
        outcomes = await partial(engine, commit(engine, begun.update_id, "s0"), "ABORTED")
        assert (outcomes["s0"].code, outcomes["s1"].reason) == (0, "NOT_ACKNOWLEDGED")
        now = await replicas(engine)
        assert (now["s0"].route, now["s1"].weight_version) == (pb.ROUTE_STATE_SERVING, 0)
        recorders.forget()
        answer = await commit(engine, begun.update_id, "s0", "s1")
        assert (kinds(answer.operation), answer.complete) == ({"s1": "DONE"}, True)
        assert {replica_id for replica_id, _ in recorders.journal} == {"s1"}


async def test_a_commit_that_failed_on_a_reset_goes_on_where_it_stopped() -> None:
    """Finishing twice would fail for ever in an engine that finishes once."""
    async with recorded("s0:standalone") as (engine, recorders):
        recorders["s0"].faults[ALL_RESET] = [internal("ENGINE_FAILED", "no luck")]
        begun = await begin(engine)
        await move_weights(engine, begun.update_id)
        await partial(engine, commit(engine, begun.update_id, "s0"), "FAILED_PRECONDITION")
        assert (await replicas(engine))["s0"].route == pb.ROUTE_STATE_HELD
        await commit(engine, begun.update_id, "s0")
        assert recorders["s0"].calls.count("finish_weight_update") == 1
        assert (await replicas(engine))["s0"].route == pb.ROUTE_STATE_SERVING


async def test_a_checksum_that_differs_is_refused() -> None:
    """The trainer's own means of moving weights can fail silently; here the engine can tell."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        await move_weights(engine, begun.update_id)
        outcomes = await partial(engine, commit(engine, begun.update_id, "s0", s0="00000000"), "DATA_LOSS")
        assert outcomes["s0"].reason == "CHECKSUM_MISMATCH"
        right = f"{google_crc32c.value(WEIGHTS):08x}"
        assert (await commit(engine, begun.update_id, "s0", s0=right)).complete


async def test_a_commit_without_bytes_needs_weights_that_are_there() -> None:
    """A trainer moves weights by its own means, but an engine that has none knows it."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine, 1)
        assert (await commit(engine, begun.update_id, "s0")).complete
    async with recorded("s0:standalone", spec_fields={"weights": pb.WEIGHTS_ORIGIN_NONE}) as (engine, _):
        begun = await begin(engine, 1)
        outcomes = await partial(engine, commit(engine, begun.update_id, "s0"), "ABORTED")
        assert outcomes["s0"].reason == "WEIGHTS_INCOMPLETE"
        assert (await replicas(engine))["s0"].route != pb.ROUTE_STATE_SERVING


async def test_a_replica_that_does_not_get_ready_is_left_out() -> None:
    """One broken engine must not stop the sync of the others."""
    async with recorded("s0:standalone", "s1:standalone") as (engine, recorders):
        recorders["s0"].faults["release_kv_cache"] = [internal("ENGINE_FAILED", "no luck")]
        begun = await begin(engine)
        assert [layout.replica_id for layout in begun.wave] == ["s1"]
        assert kinds(begun.operation) == {"s0": "FAILED", "s1": "DONE"}
        await move_weights(engine, begun.update_id)
        assert (await commit(engine, begun.update_id, "s1")).complete
        now = await replicas(engine)
        assert (now["s0"].route, now["s0"].weight_version) == (pb.ROUTE_STATE_SERVING, 0)
        recorders["s0"].faults["pause(abort)"] = [internal("ENGINE_FAILED", "no luck")]
        call = begin(engine, 2, selector=only("s0"))
        await refused(call, "FAILED_PRECONDITION", "PARTIAL")
        assert (await replicas(engine))["s0"].route == pb.ROUTE_STATE_SERVING


async def test_an_aborted_update_that_nothing_touched_serves_again() -> None:
    """A trainer that changes its mind early should cost nothing."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        answer = await abort(engine, begun.update_id)
        assert not answer.half_updated
        state = (await replicas(engine))["s0"]
        assert (state.route, state.weight_version) == (pb.ROUTE_STATE_SERVING, 0)
        assert not (await abort(engine, begun.update_id)).operation.outcomes
        await refused(commit(engine, begun.update_id, "s0"), "FAILED_PRECONDITION", "UPDATE_CLOSED")
        await refused(abort(engine, "unknown"), "NOT_FOUND", "UPDATE_UNKNOWN")


async def test_an_abort_that_the_engine_does_not_confirm_counts_as_touched() -> None:
    """Nobody knows what arrived."""
    async with recorded("s0:standalone") as (engine, recorders):
        begun = await begin(engine)
        recorders["s0"].faults["abort_weight_update"] = [internal("ENGINE_FAILED", "no luck")]
        await partial(engine, abort(engine, begun.update_id), "FAILED_PRECONDITION")
        state = (await replicas(engine))["s0"]
        assert state.route != pb.ROUTE_STATE_SERVING
        await update(engine, only("s0"), 1)
        assert (await replicas(engine))["s0"].route == pb.ROUTE_STATE_SERVING


@pytest.mark.parametrize(
    ("version", "fields", "code", "reason"),
    [
        (-1, {}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (4, {}, "FAILED_PRECONDITION", "VERSION_OLDER"),
        (6, {"kind": pb.UPDATE_KIND_ASLEEP}, "FAILED_PRECONDITION", "REPLICA_SERVING"),
        (6, {"kind": 9}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (6, {"in_flight": 9}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (6, {"selector": only("x")}, "NOT_FOUND", "REPLICA_NOT_FOUND"),
        (6, {"selector": role("colocated")}, "FAILED_PRECONDITION", "NO_REPLICA"),
    ],
)
async def test_a_wrong_begin_changes_nothing(version: int, fields: dict[str, Any], code: str, reason: str) -> None:
    """Refused before any engine was paused."""
    async with recorded("s0:standalone", spec_fields={"weight_version": 5}) as (engine, recorders):
        await refused(begin(engine, version, **fields), code, reason)
        assert recorders.journal == []


async def test_frames_out_of_order_are_refused() -> None:
    """A stream that begins with bytes has no address."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        header = pb.UpdateWeightsRequest(header=pb.UpdateWeightsHeader(run_id=RUN, update_id=begun.update_id, size=3))
        chunk = pb.UpdateWeightsRequest(chunk=b"abc")
        end = pb.UpdateWeightsRequest(end=pb.UpdateWeightsEnd(crc32c=google_crc32c.value(b"abcabc")))
        big = pb.UpdateWeightsRequest(chunk=bytes((4 << 20) + 1))
        for frames, field in (
            ([], "header"),
            ([chunk], "header"),
            ([header, header], "frame"),
            ([header, pb.UpdateWeightsRequest()], "frame"),
            ([pb.UpdateWeightsRequest()], "header"),
            ([header, big], "chunk"),
            ([header, chunk, chunk, end], "size"),
        ):
            error = await error_of(engine.stub.UpdateWeights(iter(frames)))
            assert error.code is Code.INVALID_ARGUMENT
            assert (error.metadata["field"], error.reason == "BAD_FRAME") == (field, field in ("header", "frame"))
        other = pb.UpdateWeightsHeader(run_id=RUN, update_id=begun.update_id, size=3, replica_ids=["x"])
        call = engine.stub.UpdateWeights(iter([pb.UpdateWeightsRequest(header=other)]))
        await refused(call, "INVALID_ARGUMENT", "NOT_IN_WAVE")


async def test_weights_that_no_engine_takes() -> None:
    """More bytes than the memory holds."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        outcomes = await partial(engine, move_weights(engine, begun.update_id, bytes(1 << 17)), "FAILED_PRECONDITION")
        assert outcomes["s0"].reason == "WEIGHTS_TOO_LARGE"


async def test_a_hung_replica_does_not_hold_up_the_bytes_of_the_others() -> None:
    """One broken engine would stop the training run."""
    async with recorded("s0:standalone", "s1:standalone", engine_timeout=1.0, probe_timeout=0.5) as (engine, recorders):
        begun = await begin(engine)
        hang = asyncio.Event()
        recorders["s0"].faults["update_weights"] = [hang]
        answer = await move_weights(engine, begun.update_id, chunk=20)
        assert kinds(answer.operation) == {"s0": "FAILED", "s1": "DONE"}
        outcomes = await partial(engine, commit(engine, begun.update_id, "s1"), "ABORTED")
        assert outcomes["s1"].kind == pb.OUTCOME_KIND_DONE
        hang.set()


async def test_ranks_meet() -> None:
    """Trainer ranks and engine ranks exchange what a collective needs."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        both = ["trainer", "engine"]

        def come(who: str, **fields: Any) -> Any:
            request = pb.ExchangeRendezvousRequest(
                run_id=RUN, update_id=begun.update_id, name="m", participant=who, participants=both, blob=who.encode()
            )
            if "max_wait" in fields:
                request.max_wait.CopyFrom(fields["max_wait"])
            return engine.stub.ExchangeRendezvous(request)

        error = await refused(come("trainer", max_wait=seconds(0.05)), "DEADLINE_EXCEEDED", "RENDEZVOUS_INCOMPLETE")
        assert error.metadata["missing"] == "engine"
        answers = await asyncio.gather(come("trainer"), come("engine"))
        assert {tuple(sorted(answer.blobs.items())) for answer in answers} == {
            (("engine", b"engine"), ("trainer", b"trainer"))
        }


async def test_a_meeting_ends_with_its_transaction() -> None:
    """Ranks must not wait for those of an update that was given up."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        request = pb.ExchangeRendezvousRequest(
            run_id=RUN, update_id=begun.update_id, name="m", participant="a", participants=["a", "b"]
        )
        waiting = asyncio.ensure_future(engine.stub.ExchangeRendezvous(request))
        await until(lambda: bool(engine.controller.updating.meetings._rendezvous._meetings))
        await abort(engine, begun.update_id)
        await refused(waiting, "FAILED_PRECONDITION", "UPDATE_CLOSED")


async def test_an_adapter_update_keeps_the_base_version() -> None:
    """LoRA steps do not change the base."""
    async with recorded("s0:standalone") as (engine, _):
        await update(engine, role("standalone"), 7, adapter=True)
        state = (await replicas(engine))["s0"]
        assert (state.weight_version, state.adapter_version, state.route) == (0, 7, pb.ROUTE_STATE_SERVING)


async def test_weights_may_come_in_buckets() -> None:
    """A trainer that gathers one layer at a time sends one layer at a time."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        await move_weights(engine, begun.update_id, b"first")
        await move_weights(engine, begun.update_id, b"second", move_index=1)
        right = f"{google_crc32c.value(b'firstsecond'):08x}"
        assert (await commit(engine, begun.update_id, "s0", s0=right)).complete


async def test_a_move_whose_answer_was_lost_is_replaced_by_its_repeat() -> None:
    """It went behind the first one: the engine held both, was too small for them, or had another checksum."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        for repeats in range(2):
            await move_weights(engine, begun.update_id, b"first")
            for _ in range(repeats + 1):
                await move_weights(engine, begun.update_id, b"second", move_index=1)
        right = f"{google_crc32c.value(b'firstsecond'):08x}"
        assert (await commit(engine, begun.update_id, "s0", s0=right)).complete


async def test_a_move_that_is_missing_is_told_from_one_that_comes() -> None:
    """A trainer that counts wrongly would leave a hole in the weights."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        outcomes = await partial(
            engine, move_weights(engine, begun.update_id, b"second", move_index=1), "FAILED_PRECONDITION"
        )
        assert outcomes["s0"].reason == "MOVE_OUT_OF_ORDER"
        await refused(
            move_weights(engine, begun.update_id, b"x", move_index=-1), "INVALID_ARGUMENT", "INVALID_ARGUMENT"
        )


async def test_a_resumed_trainer_may_go_back_to_older_weights() -> None:
    """Its checkpoint is older than what the engines hold."""
    async with recorded("s0:standalone", spec_fields={"weight_version": 5}) as (engine, _):
        begun = await begin(engine, 3, allow_older=True)
        await move_weights(engine, begun.update_id)
        await commit(engine, begun.update_id, "s0")
        assert (await replicas(engine))["s0"].weight_version == 3


async def test_an_update_that_is_over_cannot_be_aborted() -> None:
    """The trainer has to know that its weights do serve."""
    async with recorded("s0:standalone") as (engine, _):
        begun = await begin(engine)
        await commit(engine, begun.update_id, "s0")
        await refused(abort(engine, begun.update_id), "FAILED_PRECONDITION", "UPDATE_CLOSED")


async def test_versions_are_unset_while_there_are_no_weights() -> None:
    """0 is a version."""
    async with recorded("h0:hybrid", "s0:standalone") as (engine, _):
        await engine.stub.Sleep(pb.SleepRequest(run_id=RUN))
        now = await replicas(engine)
        assert not now["h0"].HasField("weight_version")
        assert not now["h0"].HasField("cache_version")
        assert now["s0"].HasField("weight_version")
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l"))
        begun = await begin(engine, kind=pb.UPDATE_KIND_ASLEEP, selector=only("h0"))
        assert not begun.wave[0].HasField("weight_version")
