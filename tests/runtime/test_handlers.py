"""What happens around every call, over real sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from services.runtime.config import ServiceSettings
from services.runtime.errors import Code, TurnoutError, failed_precondition, invalid_argument
from services.runtime.handlers import Handlers, InFlight
from services.runtime.metrics import CallMetrics
from services.runtime.statuses import from_rpc_error
from tests.runtime.helpers import Caller, probe_host

Context = grpc.aio.ServicerContext[Any, Any]


async def _raise(value: str) -> None:
    match value:
        case "turnout":
            raise failed_precondition("NOT_NOW", "not now: 组", field="step", value="3")
        case "bug":
            raise KeyError("/secret/path")
        case "cancelled":
            raise asyncio.CancelledError
        case "abort":
            raise AssertionError("unreachable")


async def _unary(request: StringValue, context: Context) -> StringValue:
    if request.value == "abort":
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine")
    await _raise(request.value)
    return request


async def _stream(request: StringValue, context: Context) -> AsyncIterator[StringValue]:
    yield StringValue(value="first")
    if request.value == "abort":
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine")
    await _raise(request.value)
    yield StringValue(value="last")


async def _outcome(caller: Caller, shape: str, value: str | bytes) -> tuple[list[str], TurnoutError | None]:
    """The messages of a call of any shape, and the error it ended with."""
    messages: list[str] = []
    try:
        match shape:
            case "unary":
                messages.append((await caller.unary(value)).value)
            case "join":
                messages.append((await caller.join([value])).value)
            case "stream":
                async for message in caller.stream(value):
                    messages += [message.value]
            case "each":
                async for message in caller.each([value]):
                    messages += [message.value]
    except grpc.aio.AioRpcError as error:
        return messages, from_rpc_error(error)
    return messages, None


SHAPES = ["unary", "join", "stream", "each"]


@pytest.mark.parametrize("shape", SHAPES)
async def test_messages_pass_in_every_call_shape(shape: str) -> None:
    """The wrapping parses and writes itself, so each shape has to be tried."""
    async with probe_host(unary=_unary, stream=_stream) as host, grpc.aio.insecure_channel(host.target) as channel:
        messages, error = await _outcome(Caller(channel), shape, "组 é")
    assert error is None
    assert messages == (["first", "last"] if shape in ("stream", "each") else ["组 é"])


@pytest.mark.parametrize("shape", SHAPES)
async def test_h51_domain_errors_arrive_with_code_reason_and_metadata(shape: str) -> None:
    """A status that differs between call shapes would have to be handled twice."""
    async with probe_host(unary=_unary, stream=_stream) as host, grpc.aio.insecure_channel(host.target) as channel:
        messages, error = await _outcome(Caller(channel), shape, "turnout")
    assert error is not None
    assert messages == (["first"] if shape in ("stream", "each") else [])
    assert (error.code, error.reason, error.message) == (Code.FAILED_PRECONDITION, "NOT_NOW", "not now: 组")
    assert error.metadata == {"field": "step", "value": "3"}


@pytest.mark.parametrize("shape", SHAPES)
async def test_h51_unexpected_exceptions_tell_nothing_but_an_incident(shape: str) -> None:
    """gRPC would answer UNKNOWN with the exception's text: paths, keys, internals."""
    with capture_logs() as logs:
        async with probe_host(unary=_unary, stream=_stream) as host, grpc.aio.insecure_channel(host.target) as channel:
            _, error = await _outcome(Caller(channel), shape, "bug")
    assert error is not None
    assert (error.code, error.reason, error.message) == (Code.INTERNAL, "INTERNAL", "internal error")
    (logged,) = [entry for entry in logs if entry["event"] == "call failed unexpectedly"]
    assert error.metadata == {"incident": logged["incident"]}
    assert "secret" not in repr(error.metadata)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_cancellation_that_leaks_from_a_handler_ends_the_call(shape: str) -> None:
    """gRPC takes any CancelledError for the caller's own and would leave the call open until its deadline."""
    async with probe_host(unary=_unary, stream=_stream) as host, grpc.aio.insecure_channel(host.target) as channel:
        _, error = await _outcome(Caller(channel), shape, "cancelled")
    assert error is not None
    assert error.code is Code.INTERNAL


@pytest.mark.parametrize("shape", SHAPES)
async def test_h51_bytes_that_are_no_message_are_the_callers_fault(shape: str) -> None:
    """gRPC would answer UNKNOWN with the parser's text, and log a traceback, for what any client can send."""
    async with probe_host(unary=_unary, stream=_stream) as host, grpc.aio.insecure_channel(host.target) as channel:
        for raw in (b"\xff", b"\x0a\x02\xff\xfe"):
            _, error = await _outcome(Caller(channel), shape, raw)
            assert error is not None
            assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "MALFORMED_REQUEST")


async def test_h51_unknown_and_left_out_methods_are_unimplemented() -> None:
    """A client of a later contract must be able to tell "not here" from "broken"."""
    async with probe_host() as host, grpc.aio.insecure_channel(host.target) as channel:
        caller = Caller(channel)
        for method, reason in (("NoSuch", "UNIMPLEMENTED"), ("LeftOut", "UNIMPLEMENTED")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await caller.unary("x", method)
            assert from_rpc_error(caught.value).code is Code.UNIMPLEMENTED
            assert from_rpc_error(caught.value).reason == reason
        assert from_rpc_error(caught.value).metadata == {"call": "LeftOut"}


async def test_a_status_that_a_servicer_set_itself_is_kept() -> None:
    """Reflection and channelz, which are not ours, abort by themselves."""
    async with probe_host(unary=_unary, stream=_stream) as host, grpc.aio.insecure_channel(host.target) as channel:
        for shape in ("unary", "stream"):
            _, error = await _outcome(Caller(channel), shape, "abort")
            assert error is not None
            assert (error.code, error.message) == (Code.OUT_OF_RANGE, "mine")


async def test_h51_nothing_after_an_error_is_carried_out() -> None:
    """An abort that only marks the call and returns would let the code after it change state."""
    changed: list[str] = []

    async def check_then_change(request: StringValue, context: Context) -> StringValue:
        if request.value == "bad":
            raise invalid_argument("value", "bad")
        changed.append(request.value)
        return request

    async with probe_host(unary=check_then_change) as host, grpc.aio.insecure_channel(host.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await Caller(channel).unary("bad")
        await Caller(channel).unary("good")
    assert changed == ["good"]


async def test_h51_a_status_can_be_read_with_the_standard_library_of_grpc() -> None:
    """Message and code in the details must equal those of the call, or grpc_status refuses to read them."""
    async with probe_host(unary=_unary) as host, grpc.aio.insecure_channel(host.target) as channel:
        call = Caller(channel).unary("turnout")
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    status = await rpc_status.aio.from_call(call)
    assert status is not None
    assert (status.code, status.message) == (9, "not now: 组")


@pytest.mark.parametrize("shape", ["unary", "stream"])
async def test_a_cancelled_call_runs_its_clean_up(shape: str) -> None:
    """Clean-up left to the garbage collector would keep a lease or a slot for an unknown time."""
    parked, cleaned = asyncio.Event(), asyncio.Event()

    async def park() -> None:
        try:
            parked.set()
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async def unary(request: StringValue, context: Context) -> StringValue:
        await park()
        return request

    async def stream(request: StringValue, context: Context) -> AsyncIterator[StringValue]:
        await park()
        yield request

    gc.disable()
    try:
        with capture_logs() as logs:
            async with (
                probe_host(unary=unary, stream=stream) as host,
                grpc.aio.insecure_channel(host.target) as channel,
            ):
                caller = Caller(channel)
                call = caller.unary("x") if shape == "unary" else caller.stream("x")
                await parked.wait()
                call.cancel()
                await cleaned.wait()
    finally:
        gc.enable()
    assert not [entry for entry in logs if entry["log_level"] == "error"]


async def test_a_reader_that_goes_away_mid_stream_is_no_incident() -> None:
    """Clients leave streams all the time; an error line for each would bury the real ones."""
    ended = asyncio.Event()

    async def endless(request: StringValue, context: Context) -> AsyncIterator[StringValue]:
        try:
            while True:
                yield StringValue(value="x" * 10_000)
        finally:
            ended.set()

    with capture_logs() as logs:
        async with probe_host(stream=endless) as host, grpc.aio.insecure_channel(host.target) as channel:
            call = Caller(channel).stream("x")
            async for _ in call:
                break
            call.cancel()
            await ended.wait()
    assert not [entry for entry in logs if entry["log_level"] == "error"]


class Details(grpc.HandlerCallDetails):
    """What gRPC says of a call before it begins."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class BrokenContext:
    """The context of a call whose connection breaks under the first write."""

    def __init__(self) -> None:
        self.tried = asyncio.Event()

    async def write(self, message: bytes) -> None:
        self.tried.set()
        raise grpc.aio.InternalError('Failed "execute_batch"')

    def code(self) -> int:
        return 0


async def test_a_connection_that_breaks_under_a_write_is_no_incident() -> None:
    """gRPC has an exception of its own for it, a moment before it cancels the call; it was logged with a traceback."""
    registry = CollectorRegistry()
    handlers = Handlers(name="probe", in_flight=InFlight(), metrics=CallMetrics(registry))
    handlers.ready = True
    behavior = grpc.unary_stream_rpc_method_handler(_stream, StringValue.FromString, StringValue.SerializeToString)
    handlers.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("probe", {"Stream": behavior})])
    found: Any = handlers.service(Details("/probe/Stream"))
    context = BrokenContext()
    with capture_logs() as logs:
        call = asyncio.ensure_future(found.unary_stream(b"", context))
        await context.tried.wait()
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert not logs
    assert 'code="CANCELLED"' in generate_latest(registry).decode()
    assert 'code="INTERNAL"' not in generate_latest(registry).decode()


@pytest.mark.parametrize("over", [0, 1])
async def test_h49_the_message_limit_is_exact_and_generous(over: int) -> None:
    """gRPC refuses 4 MiB by default, which real groups exceed; beyond our limit the status says what was wrong."""
    limit = 8 << 20
    settings = ServiceSettings(max_message_bytes=limit, grace_s=1)
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    # One byte of tag and four of length precede the text.
    value = "x" * (limit - 5 + over)
    served: list[int] = []

    async def unary(request: StringValue, context: Context) -> StringValue:
        served.append(len(request.value))
        return request

    async with (
        probe_host(settings=settings, unary=unary) as host,
        grpc.aio.insecure_channel(host.target, options=options) as channel,
    ):
        _, error = await _outcome(Caller(channel), "unary", value)
    if over:
        assert error is not None
        assert error.code is Code.RESOURCE_EXHAUSTED
        assert served == []
    else:
        assert error is None
        assert served == [limit - 5]


async def test_h49_an_answer_over_the_limit_is_resource_exhausted() -> None:
    """The other direction: a reply that cannot be sent must not look like a fault of the network."""

    async def large(request: StringValue, context: Context) -> StringValue:
        return StringValue(value="x" * (1 << 17))

    settings = ServiceSettings(max_message_bytes=1 << 16, grace_s=1)
    async with probe_host(settings=settings, unary=large) as host, grpc.aio.insecure_channel(host.target) as channel:
        _, error = await _outcome(Caller(channel), "unary", "x")
    assert error is not None
    assert error.code is Code.RESOURCE_EXHAUSTED


async def test_parked_waits_do_not_block_the_call_that_releases_them() -> None:
    """With a limit of streams on a connection, enough parked waits would lock out the call they wait for."""
    release = asyncio.Event()
    parked = 0

    async def stream(request: StringValue, context: Context) -> AsyncIterator[StringValue]:
        nonlocal parked
        parked += 1
        yield StringValue(value="parked")
        await release.wait()
        yield StringValue(value="released")

    async def unary(request: StringValue, context: Context) -> StringValue:
        release.set()
        return request

    async with (
        probe_host(unary=unary, stream=stream) as host,
        grpc.aio.insecure_channel(host.target) as channel,
    ):
        caller = Caller(channel)
        waits = [caller.stream("x", timeout=50) for _ in range(300)]
        for wait in waits:
            assert (await wait.read()).value == "parked"
        assert parked == 300
        await caller.unary("go")
        for wait in waits:
            assert (await wait.read()).value == "released"
