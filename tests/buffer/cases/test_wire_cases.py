"""Public reports on rejected calls that left traces, and on odd ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.runtime.errors import Code
from tests.buffer.helpers import (
    Buffer,
    Caller,
    output,
    refused,
    refused_stream,
    result,
    running_buffer,
    seconds,
    snapshot,
)
from turnout.buffer.v1 import buffer_pb2 as pb

PLACE: dict[str, Any] = {"run_id": "run", "partition": "train"}
GOOD_SPEC = pb.GroupSpec(group_id="new")
NAN = float("nan")

Request = Any
# Every unary call with one bad field beside good ones: what is sent, and the status and reason it must end with.
BAD: list[tuple[str, Request, Code, str]] = [
    ("CreateRun", pb.CreateRunRequest(run_id="a\nb", config=pb.RunConfig()), Code.INVALID_ARGUMENT, "BAD_ID"),
    (
        "CreateRun",
        pb.CreateRunRequest(run_id="x", config=pb.RunConfig(max_attempts=0)),
        Code.INVALID_ARGUMENT,
        "OUT_OF_RANGE",
    ),
    (
        "CreateRun",
        pb.CreateRunRequest(run_id="x", config=pb.RunConfig(trainer_mode=pb.TRAINER_MODE_SYNC)),
        Code.INVALID_ARGUMENT,
        "SYNC_UNSUPPORTED",
    ),
    (
        "CreateRun",
        pb.CreateRunRequest(run_id="x", config=pb.RunConfig(staleness=pb.Staleness(strategy=99))),  # type: ignore[arg-type]
        Code.INVALID_ARGUMENT,
        "UNKNOWN_ENUM_VALUE",
    ),
    (
        "CreateRun",
        pb.CreateRunRequest(run_id="x", config=pb.RunConfig(lease_times=pb.LeaseTimes(claim=seconds(-1)))),
        Code.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
    ),
    (
        "CreateRun",
        pb.CreateRunRequest(run_id="run", config=pb.RunConfig(max_attempts=9)),
        Code.ALREADY_EXISTS,
        "RUN_EXISTS",
    ),
    ("GetRun", pb.GetRunRequest(run_id="nope"), Code.NOT_FOUND, "RUN_NOT_FOUND"),
    (
        "UpdateRun",
        pb.UpdateRunRequest(run_id="run", epoch=1, config=pb.RunConfig(max_attempts=2, train_batch_size=-1)),
        Code.INVALID_ARGUMENT,
        "OUT_OF_RANGE",
    ),
    (
        "UpdateRun",
        pb.UpdateRunRequest(run_id="run", epoch=1, config=pb.RunConfig(partitions=[pb.PartitionConfig(name="z")])),
        Code.FAILED_PRECONDITION,
        "IMMUTABLE_FIELD",
    ),
    ("UpdateRun", pb.UpdateRunRequest(run_id="run", config=pb.RunConfig()), Code.FAILED_PRECONDITION, "STALE_EPOCH"),
    ("DeleteRun", pb.DeleteRunRequest(run_id="run", epoch=7), Code.FAILED_PRECONDITION, "UNKNOWN_EPOCH"),
    ("OpenEpoch", pb.OpenEpochRequest(run_id="run", epoch=1), Code.FAILED_PRECONDITION, "STALE_EPOCH"),
    ("OpenEpoch", pb.OpenEpochRequest(run_id="run", epoch=-4), Code.INVALID_ARGUMENT, "OUT_OF_RANGE"),
    ("RenewEpoch", pb.RenewEpochRequest(run_id="run", epoch=0), Code.FAILED_PRECONDITION, "STALE_EPOCH"),
    (
        "AddGroups",
        pb.AddGroupsRequest(**PLACE, epoch=1, step=9, groups=[GOOD_SPEC, pb.GroupSpec(group_id="a\x00b")]),
        Code.INVALID_ARGUMENT,
        "BAD_ID",
    ),
    (
        "AddGroups",
        pb.AddGroupsRequest(**PLACE, epoch=1, step=9, groups=[GOOD_SPEC, pb.GroupSpec(group_id="s", group_size=0)]),
        Code.INVALID_ARGUMENT,
        "OUT_OF_RANGE",
    ),
    (
        "AddGroups",
        pb.AddGroupsRequest(
            **PLACE, epoch=1, step=9, groups=[GOOD_SPEC, pb.GroupSpec(group_id="p", prompt=pb.Payload())]
        ),
        Code.INVALID_ARGUMENT,
        "PAYLOAD_EMPTY",
    ),
    ("AddGroups", pb.AddGroupsRequest(**PLACE, epoch=1, groups=[GOOD_SPEC]), Code.INVALID_ARGUMENT, "REQUIRED"),
    (
        "AddGroups",
        pb.AddGroupsRequest(**PLACE, epoch=1, step=-1, groups=[GOOD_SPEC]),
        Code.INVALID_ARGUMENT,
        "OUT_OF_RANGE",
    ),
    (
        "AddGroups",
        pb.AddGroupsRequest(**PLACE, epoch=2, step=9, groups=[GOOD_SPEC]),
        Code.FAILED_PRECONDITION,
        "UNKNOWN_EPOCH",
    ),
    (
        "AddGroups",
        pb.AddGroupsRequest(**PLACE, epoch=1, step=9, groups=[GOOD_SPEC], refill_claim_id="nope"),
        Code.NOT_FOUND,
        "REFILL_CLAIM_NOT_FOUND",
    ),
    (
        "AddGroups",
        pb.AddGroupsRequest(**PLACE, epoch=1, step=9, groups=[GOOD_SPEC], request_id="\x7f"),
        Code.INVALID_ARGUMENT,
        "BAD_ID",
    ),
    ("ClaimGroups", pb.ClaimGroupsRequest(**PLACE, worker_id=""), Code.INVALID_ARGUMENT, "BAD_ID"),
    (
        "ClaimGroups",
        pb.ClaimGroupsRequest(**PLACE, worker_id="w", max_trajectories=0),
        Code.INVALID_ARGUMENT,
        "OUT_OF_RANGE",
    ),
    ("ClaimGroups", pb.ClaimGroupsRequest(**PLACE, worker_id="w", max_bytes=0), Code.INVALID_ARGUMENT, "OUT_OF_RANGE"),
    (
        "ClaimGroups",
        pb.ClaimGroupsRequest(**PLACE, worker_id="w", max_wait=seconds(-1)),
        Code.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
    ),
    ("ClaimGroups", pb.ClaimGroupsRequest(**PLACE, worker_id="w", request_id="\n"), Code.INVALID_ARGUMENT, "BAD_ID"),
    ("SetIntake", pb.SetIntakeRequest(**PLACE, epoch=1), Code.INVALID_ARGUMENT, "REQUIRED"),
    ("SetIntake", pb.SetIntakeRequest(**PLACE, paused=True), Code.FAILED_PRECONDITION, "STALE_EPOCH"),
    (
        "AddGroups",
        pb.AddGroupsRequest(**PLACE, epoch=1, step=9, groups=[GOOD_SPEC, pb.GroupSpec(group_id="q", prompt_id="\n")]),
        Code.INVALID_ARGUMENT,
        "BAD_ID",
    ),
    (
        "CreateRun",
        pb.CreateRunRequest(run_id="x", config=pb.RunConfig(caps=pb.Caps(max_request_rate=NAN))),
        Code.INVALID_ARGUMENT,
        "OUT_OF_RANGE",
    ),
    (
        "GetLedger",
        pb.GetLedgerRequest(run_id="run", max_dropped_prompts=-1),
        Code.INVALID_ARGUMENT,
        "OUT_OF_RANGE",
    ),
    ("AckReleases", pb.AckReleasesRequest(run_id="nope", store="s", ids=["a"]), Code.NOT_FOUND, "RUN_NOT_FOUND"),
    ("RenewClaims", pb.RenewClaimsRequest(run_id="nope"), Code.NOT_FOUND, "RUN_NOT_FOUND"),
    (
        "FinishTrajectories",
        pb.FinishTrajectoriesRequest(run_id="run", partition="no", results=[result("there", 0)]),
        Code.NOT_FOUND,
        "PARTITION_NOT_FOUND",
    ),
    ("FailTrajectories", pb.FailTrajectoriesRequest(run_id="run", partition=""), Code.INVALID_ARGUMENT, "BAD_ID"),
    ("FinishGroup", pb.FinishGroupRequest(**PLACE, group_id="there"), Code.FAILED_PRECONDITION, "NOTHING_FINISHED"),
    (
        "FinishGroup",
        pb.FinishGroupRequest(**PLACE, group_id="there", epoch=2),
        Code.FAILED_PRECONDITION,
        "UNKNOWN_EPOCH",
    ),
    ("FailGroup", pb.FailGroupRequest(**PLACE, group_id="there", epoch=0), Code.FAILED_PRECONDITION, "STALE_EPOCH"),
    ("FailGroup", pb.FailGroupRequest(**PLACE, group_id="\x01"), Code.INVALID_ARGUMENT, "BAD_ID"),
    ("ReportProgress", pb.ReportProgressRequest(run_id="run", partition="no"), Code.NOT_FOUND, "PARTITION_NOT_FOUND"),
    ("GetSampleableCount", pb.GetSampleableCountRequest(**PLACE, step=-1), Code.INVALID_ARGUMENT, "OUT_OF_RANGE"),
    ("CommitSample", pb.CommitSampleRequest(run_id="run", epoch=1, lease_id="nope"), Code.NOT_FOUND, "LEASE_NOT_FOUND"),
    ("CommitSample", pb.CommitSampleRequest(run_id="run", lease_id="nope"), Code.FAILED_PRECONDITION, "STALE_EPOCH"),
    ("ReleaseSample", pb.ReleaseSampleRequest(run_id="run", epoch=1, lease_id=""), Code.INVALID_ARGUMENT, "BAD_ID"),
    ("RenewSample", pb.RenewSampleRequest(run_id="run", epoch=1, lease_id="nope"), Code.NOT_FOUND, "LEASE_NOT_FOUND"),
    (
        "ReleasePayload",
        pb.ReleasePayloadRequest(run_id="run", epoch=1, lease_id="nope"),
        Code.NOT_FOUND,
        "LEASE_NOT_FOUND",
    ),
    (
        "DeclineRefill",
        pb.DeclineRefillRequest(**PLACE, epoch=1, refill_claim_id="nope"),
        Code.NOT_FOUND,
        "REFILL_CLAIM_NOT_FOUND",
    ),
    ("EvictGroups", pb.EvictGroupsRequest(**PLACE, epoch=1, group_ids=["there", ""]), Code.INVALID_ARGUMENT, "BAD_ID"),
    ("GetGroup", pb.GetGroupRequest(**PLACE, group_id="nope"), Code.NOT_FOUND, "GROUP_NOT_FOUND"),
    ("ListGroups", pb.ListGroupsRequest(**PLACE, page_size=0), Code.INVALID_ARGUMENT, "OUT_OF_RANGE"),
    ("ListGroups", pb.ListGroupsRequest(**PLACE, page_token="x"), Code.INVALID_ARGUMENT, "BAD_PAGE_TOKEN"),
    ("ListGroups", pb.ListGroupsRequest(**PLACE, states=[77]), Code.INVALID_ARGUMENT, "UNKNOWN_ENUM_VALUE"),  # type: ignore[list-item]
    ("GetLedger", pb.GetLedgerRequest(run_id="run", partition="no"), Code.NOT_FOUND, "PARTITION_NOT_FOUND"),
    ("Checkpoint", pb.CheckpointRequest(run_id="run", epoch=1, step=-1), Code.INVALID_ARGUMENT, "OUT_OF_RANGE"),
    ("Checkpoint", pb.CheckpointRequest(run_id="run", epoch=7, step=1), Code.FAILED_PRECONDITION, "UNKNOWN_EPOCH"),
    (
        "Restore",
        pb.RestoreRequest(run_id="run", epoch=1, checkpoint_id="c"),
        Code.NOT_FOUND,
        "CHECKPOINT_NOT_FOUND",
    ),
    ("Restore", pb.RestoreRequest(run_id="run", epoch=1), Code.INVALID_ARGUMENT, "BAD_ID"),
    ("ListCheckpoints", pb.ListCheckpointsRequest(run_id="no"), Code.NOT_FOUND, "RUN_NOT_FOUND"),
    (
        "VerifyCheckpoint",
        pb.VerifyCheckpointRequest(run_id="run", checkpoint_id="c"),
        Code.NOT_FOUND,
        "CHECKPOINT_NOT_FOUND",
    ),
    (
        "DeleteCheckpoint",
        pb.DeleteCheckpointRequest(run_id="run", checkpoint_id="c"),
        Code.NOT_FOUND,
        "CHECKPOINT_NOT_FOUND",
    ),
]
STREAMS: list[tuple[str, Request, Code, str]] = [
    ("WatchDepth", pb.WatchDepthRequest(**PLACE, step=-1), Code.INVALID_ARGUMENT, "OUT_OF_RANGE"),
    (
        "WatchDepth",
        pb.WatchDepthRequest(**PLACE, step=1, min_interval=seconds(-1)),
        Code.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
    ),
    ("WatchGroups", pb.WatchGroupsRequest(run_id="nope", from_sequence=1), Code.NOT_FOUND, "RUN_NOT_FOUND"),
    (
        "WaitForSampleable",
        pb.WaitForSampleableRequest(**PLACE, epoch=1, step=9, target=-1),
        Code.INVALID_ARGUMENT,
        "TARGET_OUT_OF_RANGE",
    ),
    ("Sample", pb.SampleRequest(**PLACE, epoch=1, step=9, batch=0), Code.INVALID_ARGUMENT, "TARGET_OUT_OF_RANGE"),
    ("WatchReleases", pb.WatchReleasesRequest(run_id="nope", store="s"), Code.NOT_FOUND, "RUN_NOT_FOUND"),
    ("GetPayloads", pb.GetPayloadsRequest(run_id="run", lease_id="nope"), Code.NOT_FOUND, "LEASE_NOT_FOUND"),
    ("GetPayloads", pb.GetPayloadsRequest(run_id="run"), Code.INVALID_ARGUMENT, "REQUIRED"),
]


@pytest.fixture
async def busy(buffer: Buffer) -> Caller:
    """A run with something in every state, under epoch 1 and step 3."""
    caller = buffer.caller()
    await caller.create(max_attempts=1)
    await caller.open()
    await caller.finish_new("leased", "finished", step=3)
    await caller.sample(1, step=3)
    await caller.add("running", "there", step=3)
    await caller.claim()
    await caller.add("failed", step=3)
    await caller.stub.FailGroup(pb.FailGroupRequest(**PLACE, group_id="failed"))
    return caller


@pytest.mark.parametrize(
    ("call", "request_", "code", "reason"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_h51_a_refused_call_leaves_no_trace(
    buffer: Buffer, busy: Caller, call: str, request_: Request, code: Code, reason: str
) -> None:
    """Code after an abort that did not raise kept running and mutated state; exceptions became UNKNOWN."""
    before = snapshot(buffer)
    error = await refused(getattr(busy.stub, call)(request_))
    assert (error.code, error.reason) == (code, reason)
    assert error.metadata, "the offending field is named"
    assert snapshot(buffer) == before


@pytest.mark.parametrize(
    ("call", "request_", "code", "reason"), STREAMS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_h51_a_refused_stream_leaves_no_trace(
    buffer: Buffer, busy: Caller, call: str, request_: Request, code: Code, reason: str
) -> None:
    before = snapshot(buffer)
    error = await refused_stream(getattr(busy.stub, call)(request_))
    assert (error.code, error.reason) == (code, reason)
    assert snapshot(buffer) == before


def frames(*messages: Any) -> Callable[[], AsyncIterator[Any]]:
    async def send() -> AsyncIterator[Any]:
        for message in messages:
            yield message

    return send


HEADER = pb.PutPayloadRequest(header=pb.PutPayloadHeader(run_id="run"))
CHUNK = pb.PutPayloadRequest(chunk=b"abc")


@pytest.mark.parametrize(
    ("sent", "code", "reason"),
    [
        ([CHUNK], Code.INVALID_ARGUMENT, "BAD_FRAME"),
        ([], Code.INVALID_ARGUMENT, "BAD_FRAME"),
        ([pb.PutPayloadRequest()], Code.INVALID_ARGUMENT, "BAD_FRAME"),
        ([HEADER, CHUNK], Code.INVALID_ARGUMENT, "BAD_FRAME"),
        ([HEADER, CHUNK, HEADER], Code.INVALID_ARGUMENT, "BAD_FRAME"),
        ([HEADER, CHUNK, pb.PutPayloadRequest(end=pb.PutPayloadEnd(crc32c=1))], Code.DATA_LOSS, "CRC_MISMATCH"),
        ([HEADER, pb.PutPayloadRequest(chunk=bytes((4 << 20) + 1))], Code.INVALID_ARGUMENT, "CHUNK_TOO_LARGE"),
        (
            [
                pb.PutPayloadRequest(header=pb.PutPayloadHeader(run_id="run", size=4)),
                CHUNK,
                pb.PutPayloadRequest(end=pb.PutPayloadEnd(crc32c=0x364B3FB7)),
            ],
            Code.INVALID_ARGUMENT,
            "SIZE_MISMATCH",
        ),
        (
            [pb.PutPayloadRequest(header=pb.PutPayloadHeader(run_id="run", size=-1))],
            Code.INVALID_ARGUMENT,
            "OUT_OF_RANGE",
        ),
        ([pb.PutPayloadRequest(header=pb.PutPayloadHeader(run_id="nope"))], Code.NOT_FOUND, "RUN_NOT_FOUND"),
        (
            [pb.PutPayloadRequest(header=pb.PutPayloadHeader(run_id="run", size=1 << 50))],
            Code.RESOURCE_EXHAUSTED,
            "CAP_BYTES",
        ),
    ],
)
async def test_h51_a_refused_upload_leaves_no_trace(
    buffer: Buffer, busy: Caller, sent: list[pb.PutPayloadRequest], code: Code, reason: str
) -> None:
    before = snapshot(buffer)
    error = await refused(busy.stub.PutPayload(frames(*sent)()))
    assert (error.code, error.reason) == (code, reason)
    assert snapshot(buffer) == before


STREAM_HEADER = pb.FinishStreamRequest(header=pb.FinishStreamHeader(**PLACE))
STREAM_BATCH = pb.FinishStreamRequest(batch=pb.FinishStreamBatch(sequence=1))


@pytest.mark.parametrize(
    ("sent", "code", "reason"),
    [
        ([STREAM_BATCH], Code.INVALID_ARGUMENT, "BAD_FRAME"),
        ([pb.FinishStreamRequest()], Code.INVALID_ARGUMENT, "BAD_FRAME"),
        ([STREAM_HEADER, STREAM_HEADER], Code.INVALID_ARGUMENT, "BAD_FRAME"),
        ([STREAM_HEADER, STREAM_BATCH, STREAM_BATCH], Code.INVALID_ARGUMENT, "OUT_OF_RANGE"),
        (
            [pb.FinishStreamRequest(header=pb.FinishStreamHeader(run_id="run", partition="no"))],
            Code.NOT_FOUND,
            "PARTITION_NOT_FOUND",
        ),
    ],
)
async def test_h51_a_refused_finish_stream_leaves_no_trace(
    buffer: Buffer, busy: Caller, sent: list[pb.FinishStreamRequest], code: Code, reason: str
) -> None:
    before = snapshot(buffer)
    error = await refused_stream(busy.stub.FinishStream(frames(*sent)()))
    assert (error.code, error.reason) == (code, reason)
    assert snapshot(buffer) == before


def test_h51_every_call_of_the_contract_is_tried() -> None:
    """A new call must not slip past the check that a refusal leaves no trace."""
    calls = {method.name for method in pb.DESCRIPTOR.services_by_name["ReplayBuffer"].methods}
    tried = {name for name, *_ in [*BAD, *STREAMS]} | {"PutPayload", "FinishStream"}
    # It takes nothing that could be wrong.
    assert calls - tried == {"ListRuns"}


async def test_h51_an_internal_error_tells_no_path_and_changes_nothing(tmp_path: Path) -> None:
    """The text of an unexpected exception, with a path of the server, went out as UNKNOWN."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        caller = buffer.caller()
        await caller.create()
        await caller.finish_new("g")
        (tmp_path / "checkpoints").write_text("in the way")
        error = await refused(caller.checkpoint("c"))
        assert error.code not in (Code.UNKNOWN, Code.OK)
        said = f"{error.message} {error.metadata}"
        assert str(tmp_path) not in said
        assert "Error" not in said
        assert (await caller.depth()).sampleable == 1
        (tmp_path / "checkpoints").unlink()
        assert (await caller.checkpoint("c")).checkpoint.counts.finished == 1


async def test_h51_bad_items_of_a_batch_leave_no_trace(buffer: Buffer, busy: Caller) -> None:
    before = snapshot(buffer)
    bad = [
        result("there", 0, output(NAN)),
        result("there", 0, pb.Output()),
        result("there", 1),
        result("there", 0, token=pb.ClaimToken(claim_id="nope", attempt=1)),
        result("running", 0),
        result("failed", 0),
    ]
    outcomes = await busy.finish(*bad)
    assert [outcome.reason for outcome in outcomes] == [
        "REWARD_NOT_FINITE",
        "EMPTY_TRAJECTORY",
        "INDEX_OUT_OF_RANGE",
        "STALE_CLAIM",
        "STALE_CLAIM",
        "GROUP_FAILED",
    ]
    assert all(outcome.metadata["field"] for outcome in outcomes)
    failures = [
        pb.TrajectoryFailure(group_id="there", index=0),
        pb.TrajectoryFailure(group_id="there", index=0, kind=42),  # type: ignore[arg-type]
        pb.TrajectoryFailure(group_id="leased", index=0, kind=pb.FAILURE_KIND_PERMANENT),
    ]
    answer = await busy.stub.FailTrajectories(pb.FailTrajectoriesRequest(**PLACE, failures=failures))
    assert [outcome.reason for outcome in answer.outcomes] == [
        "KIND_UNSPECIFIED",
        "UNKNOWN_ENUM_VALUE",
        "GROUP_SAMPLED",
    ]
    progress = [pb.TrajectoryProgress(group_id="there", index=0, done=-1)]
    report = await busy.stub.ReportProgress(pb.ReportProgressRequest(**PLACE, progress=progress))
    assert [outcome.reason for outcome in report.outcomes] == ["OUT_OF_RANGE"]
    assert snapshot(buffer) == before


ODD_IDS = [
    "组-0",
    "🚀",
    "e\u0301",
    "é",
    "שלום",
    " ",
    "a/b",
    "../x",
    "a\u2028b",
    "\u200e",
    "x" * 512,
    "é" * 256,
    "%s",
    "*",
]
REFUSED_IDS = ["", "a\x00b", "line\nbreak", "\x1f", "\x7f", "x" * 513, "é" * 257, "x" * 10_240]


async def test_h52_odd_ids_round_trip_byte_for_byte(buffer: Buffer) -> None:
    """Non-ASCII text broke in headers and error paths; normalisation merged ids that differ."""
    for run_id in ODD_IDS:
        caller = buffer.caller(run_id, partition="组")
        partitions = [pb.PartitionConfig(name="组")]
        await caller.create(partitions=partitions)
        await caller.open()
        await caller.add(*ODD_IDS, prompt=b"p")
        claims = await caller.claim(len(ODD_IDS), worker="🚀 w")
        assert [claim.group_id for claim in claims] == ODD_IDS
        assert (await caller.group("é")).trajectories[0].worker_id == "🚀 w"
        for claim in claims:
            await caller.finish_claim(claim)
        assert [group.group_id for group in await caller.groups()] == ODD_IDS
        told = await caller.sample(len(ODD_IDS), request_id=run_id)
        assert told.ids == ODD_IDS
        assert await caller.commit(told.done.lease_id) == ODD_IDS
        # In error paths too.
        error = await refused(caller.group("e\u0301"))
        assert (error.code, error.metadata["value"]) == (Code.NOT_FOUND, "e\u0301")
    listed = await buffer.caller().stub.ListRuns(pb.ListRunsRequest())
    assert sorted(run.run_id for run in listed.runs) == sorted(ODD_IDS)


async def test_h52_odd_ids_are_saved_and_restored_and_name_no_file(tmp_path: Path) -> None:
    """An id with a slash or dots is a path, and one in Chinese no file name everywhere."""
    async with running_buffer(data_dir=tmp_path) as buffer:
        for run_id in ODD_IDS:
            caller = buffer.caller(run_id)
            await caller.create()
            await caller.open()
            await caller.finish_new(*ODD_IDS)
            await caller.add("failed: 组")
            [claim] = await caller.claim()
            [outcome] = await caller.fail(claim, pb.FAILURE_KIND_PERMANENT, error="🚀 e\u0301")
            assert outcome.code == 0
            assert (await caller.group("failed: 组")).trajectories[0].error == "🚀 e\u0301"
            await caller.checkpoint(run_id)
            await caller.take(len(ODD_IDS))
            assert [info.checkpoint_id for info in await caller.checkpoints()] == [run_id]
            await caller.restore(run_id)
            assert (await caller.sample(len(ODD_IDS))).ids == ODD_IDS
    names = relative_names(tmp_path)
    assert names
    assert all(name.isascii() and " " not in name and ".." not in name for name in names)


def relative_names(directory: Path) -> list[str]:
    """The paths of all files below a directory."""
    return [str(path.relative_to(directory)) for path in directory.rglob("*")]


@pytest.mark.parametrize("bad", REFUSED_IDS, ids=ascii)
async def test_h52_ids_that_cannot_travel_are_refused(caller: Caller, bad: str) -> None:
    await caller.create()
    await caller.open()
    for call in (
        caller.add("good", bad),
        caller.claim(worker=bad),
        caller.group(bad),
        caller.evict(bad),
        caller.commit(bad),
        caller.stub.GetRun(pb.GetRunRequest(run_id=bad)),
    ):
        error = await refused(call)
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "BAD_ID")
    [outcome] = await caller.finish(result(bad, 0))
    assert (outcome.code, outcome.reason) == (3, "BAD_ID")
    assert (await caller.ledger()).added == 0


async def test_h52_a_lone_surrogate_never_leaves_the_client(caller: Caller) -> None:
    await caller.create()
    with pytest.raises((UnicodeEncodeError, ValueError)):
        await asyncio.wait_for(caller.group("\ud800"), 5)
