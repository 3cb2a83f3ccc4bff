"""From a status to a typed error."""

from __future__ import annotations

import grpc
import pytest

from tests.client.fakes import fail, failing, fake
from turnout import client as turnout_client
from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, PartialFailure, StaleClaim, StaleEpoch, TurnoutError, item_error
from turnout.client._errors import from_rpc_error

BY_CODE = {
    grpc.StatusCode.CANCELLED: "Cancelled",
    grpc.StatusCode.UNKNOWN: "InternalError",
    grpc.StatusCode.INVALID_ARGUMENT: "InvalidArgument",
    grpc.StatusCode.DEADLINE_EXCEEDED: "DeadlineExceeded",
    grpc.StatusCode.NOT_FOUND: "NotFound",
    grpc.StatusCode.ALREADY_EXISTS: "AlreadyExists",
    grpc.StatusCode.PERMISSION_DENIED: "PermissionDenied",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "ResourceExhausted",
    grpc.StatusCode.FAILED_PRECONDITION: "FailedPrecondition",
    grpc.StatusCode.ABORTED: "Aborted",
    grpc.StatusCode.OUT_OF_RANGE: "OutOfRange",
    grpc.StatusCode.UNIMPLEMENTED: "Unimplemented",
    grpc.StatusCode.INTERNAL: "InternalError",
    grpc.StatusCode.DATA_LOSS: "DataLoss",
    grpc.StatusCode.UNAUTHENTICATED: "Unauthenticated",
}


@pytest.mark.parametrize("code", list(BY_CODE), ids=lambda code: code.name)
def test_each_status_has_its_class_and_keeps_what_the_service_said(code: grpc.StatusCode) -> None:
    """A caller who catches NotFound must not get a bare RpcError, and needs the reason and the offending field."""
    with fake("buffer") as service, BufferClient(service.target) as client:
        service.script["GetRun"] = failing(code, "SOME_REASON", field="run_id", value="r1")
        with pytest.raises(TurnoutError) as caught:
            client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))
    error = caught.value
    assert type(error) is getattr(turnout_client, BY_CODE[code])
    assert (error.code, error.reason, error.from_service) == (code, "SOME_REASON", True)
    assert error.metadata == {"field": "run_id", "value": "r1"}
    assert str(error) == f"{code.name} / SOME_REASON: scripted SOME_REASON"
    assert len(service.requests("GetRun")) == 1


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", StaleEpoch),
        (grpc.StatusCode.FAILED_PRECONDITION, "STALE_CLAIM", StaleClaim),
        (grpc.StatusCode.FAILED_PRECONDITION, "OUT_OF_ORDER", turnout_client.OutOfOrder),
        (grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND", turnout_client.RunNotFound),
        (grpc.StatusCode.UNAVAILABLE, "PARTIAL", PartialFailure),
        (grpc.StatusCode.ABORTED, "PARTIAL", PartialFailure),
    ],
)
def test_reasons_that_programs_act_on_have_classes(
    code: grpc.StatusCode, reason: str, kind: type[TurnoutError]
) -> None:
    """PARTIAL must not be mistaken for UNAVAILABLE: the operation has ended, retrying is the caller's decision."""
    with fake("buffer") as service, BufferClient(service.target) as client:
        service.script["GetRun"] = failing(code, reason, operation_id="op-1")
        with pytest.raises(kind) as caught:
            client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))
    assert type(caught.value) is kind
    assert len(service.requests("GetRun")) == 1
    if isinstance(caught.value, PartialFailure):
        assert caught.value.operation_id == "op-1"


def test_a_status_without_error_info_is_not_taken_for_the_service() -> None:
    """A proxy's 503 or a plain gRPC error has no reason of ours; programs must see the difference."""

    def plain(request: object, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "a proxy says no")

    with fake("buffer") as service, BufferClient(service.target) as client:
        service.script["GetRun"] = plain
        with pytest.raises(turnout_client.PermissionDenied) as caught:
            client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))
    assert (caught.value.reason, caught.value.from_service) == ("PERMISSION_DENIED", False)
    assert caught.value.message == "a proxy says no"


@pytest.mark.parametrize(
    ("code", "text", "lost"),
    [
        (grpc.StatusCode.CANCELLED, "", True),
        (grpc.StatusCode.CANCELLED, "Locally cancelled by application!", False),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", True),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", True),
        (grpc.StatusCode.INTERNAL, "Exception deserializing response!", False),
        (grpc.StatusCode.UNKNOWN, "Stream removed", True),
        (grpc.StatusCode.UNKNOWN, "something else", False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received RST_STREAM with error code 11", False),
    ],
)
def test_a_call_that_was_cut_is_unavailable_whatever_grpc_calls_it(
    code: grpc.StatusCode, text: str, lost: bool
) -> None:
    """A server that dies with a call at work is seen as CANCELLED; a worker that does not retry it dies, too."""
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=text))
    assert isinstance(error, turnout_client.Unavailable) is lost
    assert not error.from_service
    assert text in error.message


def test_streams_raise_the_same_errors() -> None:
    """An error in the middle of a stream must not leak as an RpcError."""

    def handler(request: object, context: grpc.ServicerContext) -> list[object]:
        fail(context, grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND")
        return []

    with fake("buffer") as service, BufferClient(service.target) as client:
        service.script["WatchDepth"] = handler
        with pytest.raises(turnout_client.RunNotFound):
            list(client.calls.WatchDepth(buffer_pb2.WatchDepthRequest(run_id="r1")))


def test_item_outcomes_become_errors_of_the_same_tree() -> None:
    """Batch calls answer OK with outcomes; a program that ignores them loses results silently."""
    assert item_error(buffer_pb2.ItemOutcome()) is None
    error = item_error(
        buffer_pb2.ItemOutcome(code=9, reason="STALE_CLAIM", message="lost", metadata={"claim_id": "c1"})
    )
    assert isinstance(error, StaleClaim)
    assert error.metadata == {"claim_id": "c1"}
    assert isinstance(item_error(buffer_pb2.ItemOutcome(code=99, reason="NEW")), TurnoutError)
