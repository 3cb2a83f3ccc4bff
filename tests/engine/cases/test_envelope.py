"""Cases H51 and H52 for the engine controller: refused calls leave no trace, and ids are opaque."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.runtime.errors import Code
from tests.engine.helpers import (
    RUN,
    Engine,
    error_of,
    generate,
    generate_request,
    only,
    refused,
    register,
    replicas,
    seconds,
    spec,
)
from tests.engine.recorder import recorded
from turnout.engine.v1 import engine_pb2 as pb

GOOD = only("h0")
BAD = only("h0", "nobody")
BOGUS: Any = 99

CALLS: dict[str, Callable[[Engine], Any]] = {
    "OpenEpoch": lambda e: e.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN, epoch=-1)),
    "Register": lambda e: e.stub.Register(pb.RegisterRequest(run_id=RUN, spec=spec("new", shards=-1))),
    "Register of another run": lambda e: e.stub.Register(pb.RegisterRequest(run_id="other", spec=spec("new"))),
    "Deregister": lambda e: e.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="nobody")),
    "Sleep": lambda e: e.stub.Sleep(pb.SleepRequest(run_id=RUN, selector=BAD)),
    "Sleep at an unknown level": lambda e: e.stub.Sleep(pb.SleepRequest(run_id=RUN, selector=GOOD, level=BOGUS)),
    "Sleep without time": lambda e: e.stub.Sleep(pb.SleepRequest(run_id=RUN, selector=GOOD, timeout=seconds(0))),
    "WakeUp": lambda e: e.stub.WakeUp(pb.WakeUpRequest(run_id=RUN, tags=pb.TagList(tags=["weights", "x"]))),
    "ReleaseKvCache": lambda e: e.stub.ReleaseKvCache(pb.ReleaseKvCacheRequest(run_id=RUN, selector=BAD)),
    "ResumeKvCache": lambda e: e.stub.ResumeKvCache(pb.ResumeKvCacheRequest(run_id=RUN, selector=BAD)),
    "Pause": lambda e: e.stub.Pause(pb.PauseRequest(run_id=RUN, selector=GOOD, mode=BOGUS)),
    "Resume": lambda e: e.stub.Resume(pb.ResumeRequest(run_id=RUN, selector=GOOD, epoch=7)),
    "ResetCaches": lambda e: e.stub.ResetCaches(pb.ResetCachesRequest(run_id=RUN, selector=GOOD, caches=[BOGUS])),
    "Abort": lambda e: e.stub.Abort(pb.AbortRequest(run_id=RUN, selector=BAD, all_requests=True)),
    "CollectiveRpc": lambda e: e.stub.CollectiveRpc(pb.CollectiveRpcRequest(run_id=RUN, selector=GOOD, method="x")),
    "BeginLend": lambda e: e.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l", replica_ids=["h0", "s0"])),
    "BeginLend without an id": lambda e: e.stub.BeginLend(pb.BeginLendRequest(run_id=RUN)),
    "FinishLend": lambda e: e.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, lend_id="x", weight_version=1)),
    "AbortLend": lambda e: e.stub.AbortLend(pb.AbortLendRequest(run_id=RUN)),
    "Reclaim": lambda e: e.stub.Reclaim(pb.ReclaimRequest(run_id=RUN, replica_ids=["h0", "nobody"])),
    "BeginWeightUpdate": lambda e: e.stub.BeginWeightUpdate(
        pb.BeginWeightUpdateRequest(run_id=RUN, selector=GOOD, weight_version=-1)
    ),
    "CommitWeightUpdate": lambda e: e.stub.CommitWeightUpdate(pb.CommitWeightUpdateRequest(run_id=RUN, update_id="x")),
    "AbortWeightUpdate": lambda e: e.stub.AbortWeightUpdate(pb.AbortWeightUpdateRequest(run_id=RUN, update_id="x")),
    "ReportVacated": lambda e: e.stub.ReportVacated(pb.ReportVacatedRequest(run_id=RUN, update_id="x")),
    "ExchangeRendezvous": lambda e: e.stub.ExchangeRendezvous(pb.ExchangeRendezvousRequest(run_id=RUN, update_id="x")),
    "Generate": lambda e: anext(aiter(e.stub.Generate(generate_request("r", sampling=pb.Sampling(top_p=2.0))))),
    "GetOperation": lambda e: e.stub.GetOperation(pb.GetOperationRequest(run_id=RUN, operation_id="x")),
    "ListOperations": lambda e: e.stub.ListOperations(pb.ListOperationsRequest(run_id=RUN, page_size=-1)),
    "another run": lambda e: e.stub.ListReplicas(pb.ListReplicasRequest(run_id="other")),
}


@pytest.mark.parametrize("name", CALLS)
async def test_h51_a_refused_call_changes_nothing(name: str) -> None:
    """Code behind a failed check went on and changed state; statuses were UNKNOWN with the text of an exception."""
    async with recorded("h0:hybrid", "s0:standalone") as (engine, recorders):
        before = await replicas(engine)
        operations = await engine.stub.ListOperations(pb.ListOperationsRequest(run_id=RUN))
        error = await error_of(CALLS[name](engine))
        assert error.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.PERMISSION_DENIED)
        assert error.metadata
        assert "Traceback" not in error.message
        assert await replicas(engine) == before
        assert await engine.stub.ListOperations(pb.ListOperationsRequest(run_id=RUN)) == operations
        assert recorders.journal == []


@pytest.mark.parametrize("text", ["组-0", "🚀", "e\u0301", "é", "א ב", " ", "a/b", "../x", "x" * 512])
async def test_h52_ids_go_round_byte_for_byte(text: str) -> None:
    """Non-ASCII ids broke in headers; normalised ones met others."""
    async with recorded(scale=0.01) as (engine, _):
        await register(engine, text, "standalone", gpus=[])
        assert list(await replicas(engine)) == [text]
        output = await generate(engine, text, session_id=text, max_tokens=3)
        assert (output.placed, output.segments[0].replica_id) == ([text], text)
        pause = await engine.stub.Pause(pb.PauseRequest(run_id=RUN, selector=only(text)))
        assert pause.operation.outcomes[0].replica_id == text
        await engine.stub.Abort(pb.AbortRequest(run_id=RUN, request_ids=[text]))


@pytest.mark.parametrize("text", ["", "a\x00b", "a\nb", "x" * 513])
async def test_h52_ids_that_cannot_be_are_refused(text: str) -> None:
    """An empty id is one nobody meant."""
    async with recorded("s0:standalone") as (engine, _):
        call = engine.stub.Register(pb.RegisterRequest(run_id=RUN, spec=spec(text, "standalone")))
        await refused(call, "INVALID_ARGUMENT", "BAD_ID")
        await refused(generate(engine, text), "INVALID_ARGUMENT", "BAD_ID")
        await refused(engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=text)), "INVALID_ARGUMENT", "BAD_ID")
