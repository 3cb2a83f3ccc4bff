"""What happens around every call: errors become statuses, calls are counted and known.

Invariants: a call ends with a status of ours or as it was cancelled, never with UNKNOWN, a traceback or the text of an
unexpected exception; messages are parsed and written here, so that bytes that are no message are the caller's error and
not ours; every call at work is in `InFlight` until its handler's clean-up has run; with a guard, a servicer hears of no
call and of no message that its caller may not send. Servicers answer with what they return or yield; `context.read` and
`context.write` are not theirs to use.

Each method is wrapped once, and all are found through one generic handler. An interceptor, or methods that gRPC knows
as registered, would cost every call more than the wrapping: with registered ones grpc.aio waits for the next call by
one future a method, all of them attached and detached again at every call.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from types import CoroutineType
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from services.runtime.draining import draining_error
from services.runtime.errors import Code, TurnoutError, internal, invalid_argument, unavailable, unimplemented
from services.runtime.guard import Caller, Gate, Guard
from services.runtime.logs import get_logger
from services.runtime.metrics import CallMetrics
from services.runtime.statuses import abort
from services.runtime.tracing import Traces

A = TypeVar("A")
C = TypeVar("C", bound=Callable[..., object])
M = TypeVar("M", bound=Message)
R = TypeVar("R")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_INFRASTRUCTURE: Final = "/grpc."
"""Health, reflection and channelz answer while the service starts and stops, and delay neither."""

_HEALTH: Final = "/grpc.health."
_LAST_WORDS_S: Final = 0.5
"""To tell the watchers of its health that it stops, on a local network."""


_GONE_S: Final = 1.0
"""How long gRPC may take to cancel a call whose connection broke under a write: it is one turn of its event loop."""


class _PeerGoneError(Exception):
    """The connection broke while an answer was written."""


def takes_bytes(method: C) -> C:
    """Let a method that is sent a stream have its messages as the bytes that came, for it to parse with `parsed`.

    Its first message alone may name a run: it is the one that the caller's token is held against.
    """
    method.__dict__["takes_bytes"] = True
    return method


def parsed(kind: type[M], raw: bytes) -> M:
    """The message that a caller sent. Raises INVALID_ARGUMENT / MALFORMED_REQUEST."""
    return _parsed(kind.FromString, raw)


def _parsed(parse: Callable[[bytes], A], raw: bytes) -> A:
    try:
        return parse(raw)
    except Exception as error:
        raise invalid_argument("request", "the request is not a valid message", reason="MALFORMED_REQUEST") from error


class InFlight:
    """The calls at work."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.Task[Any], str] = {}
        self._ended: dict[asyncio.Task[Any], TurnoutError] = {}

    def enter(self, method: str) -> asyncio.Task[Any]:
        """Note and return the running task, which serves a call of `method`."""
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = method
        return task

    def leave(self, task: asyncio.Task[Any]) -> None:
        """The handler of the call has ended."""
        self._calls.pop(task, None)
        self._ended.pop(task, None)

    def end(self, task: asyncio.Task[Any], error: TurnoutError) -> None:
        """Cancel a call, which then ends with `error`."""
        if task in self._calls:
            self._ended[task] = error
            task.cancel()

    def ended_with(self, task: asyncio.Task[Any]) -> TurnoutError | None:
        """The error for which this call was cancelled by `end`."""
        return self._ended.get(task)

    async def end_infrastructure(self) -> None:
        """End the streams of health and reflection, which would last as long as their clients.

        Those of health end by themselves, with a last word, unless their reader is stuck.
        """
        last_words = {task for task, method in self._calls.items() if method.startswith(_HEALTH)}
        for task, method in list(self._calls.items()):
            if method.startswith(_INFRASTRUCTURE) and task not in last_words:
                self.end(task, draining_error())
        if last_words:
            _, stuck = await asyncio.wait(last_words, timeout=_LAST_WORDS_S)
            for task in stuck:
                self.end(task, draining_error())

    async def finish(self, timeout: float) -> None:
        """Give the calls of the service that are at work this long to end by themselves."""
        serving = [task for task, method in self._calls.items() if not method.startswith(_INFRASTRUCTURE)]
        if serving:
            await asyncio.wait(serving, timeout=timeout)

    async def wait_empty(self, timeout: float) -> bool:
        """Wait until every call's handler, its clean-up included, has ended; False if some remain."""
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=timeout)
        return not self._calls


class Handlers(grpc.GenericRpcHandler):
    """Every method of one server, wrapped. Servicers are added to it as to a server."""

    def __init__(
        self,
        *,
        name: str,
        in_flight: InFlight,
        metrics: CallMetrics,
        guard: Guard | None = None,
        traces: Traces | None = None,
    ) -> None:
        """Without a `guard` whoever reaches the server may make every call; without `traces` there are no spans."""
        self._log = get_logger(name)
        self._in_flight = in_flight
        self._metrics = metrics
        self._guard = guard
        self._traces = traces
        self._services: list[grpc.GenericRpcHandler] = []
        self._wrapped: dict[str, Handler] = {}
        self.ready = False
        """Until the service has started, its calls (not those of health) are UNAVAILABLE / STARTING."""
        self.ending = False
        """Once the service has drained, its new calls are UNAVAILABLE / DRAINING."""

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Add a service; called by generated code."""
        self._services += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Nothing: generated code adds the same methods as generic ones. See the top of the module."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The wrapped handler of a call; None, if there is no such method, is UNIMPLEMENTED."""
        method = str(handler_call_details.method)
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            for service in self._services:
                handler = service.service(handler_call_details)
                if handler is not None:
                    wrapped = self._wrapped[method] = self._wrap(method, handler)
                    break
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        metrics = self._metrics.of(method)
        infrastructure = method.startswith(_INFRASTRUCTURE)
        parse = handler.request_deserializer
        gate = None if self._guard is None or parse is None else self._guard.gate(method, parse(b""))

        async def around(serve: Serve[A, R], asked: A, context: Context) -> R:
            task = self._in_flight.enter(method)
            began = metrics.began()
            ended = ""
            caller = None
            try:
                if gate is not None:
                    caller = gate.admit(task, context)
                if not (self.ready or infrastructure):
                    raise unavailable("STARTING", "the service is starting; the call may be repeated")
                if self.ending and not infrastructure:
                    raise draining_error()
                return await serve(asked, context, caller)
            except BaseException as error:
                try:
                    await self._failed(context, method, task, error)
                except asyncio.CancelledError:
                    ended = "CANCELLED"
                    raise
                if isinstance(error, asyncio.CancelledError):
                    ended = "CANCELLED"
                raise
            finally:
                if caller is not None:
                    caller.leave(task)
                metrics.ended(began, ended or _code_name(context))
                self._in_flight.leave(task)

        served: Any = around
        if self._traces is not None and not infrastructure:
            served = self._traces.around(method, around, _code_name)
        return _wrapped(handler, served, _send_whole if infrastructure else _send, gate)

    async def _failed(self, context: Context, method: str, task: asyncio.Task[Any], error: BaseException) -> None:
        """End a call with the status that its error stands for; returns if the error itself ends it."""
        if isinstance(error, TurnoutError):
            await abort(context, error)
        if isinstance(error, grpc.aio.AbortError):
            return
        if isinstance(error, _PeerGoneError):
            # gRPC hears of it at the same time, and cancels the call: nobody is left to be told anything.
            await asyncio.sleep(_GONE_S)
            await abort(context, unavailable("CONNECTION_LOST", "the connection broke; the call may be repeated"))
        if isinstance(error, asyncio.CancelledError):
            ended_with = self._in_flight.ended_with(task)
            if ended_with is not None:
                task.uncancel()
                await abort(context, ended_with)
            if task.cancelling():
                # The caller cancelled, or its deadline or our grace has passed: gRPC has ended the call.
                return
            # It leaked out of something that the handler awaited. gRPC would leave the call open for ever.
            await self._incident(context, method, error)
        if isinstance(error, Exception):
            if isinstance(error, NotImplementedError) and _code_name(context) == "UNIMPLEMENTED":
                # A generated base method: the service leaves the call out.
                await abort(context, unimplemented(method.rpartition("/")[2]))
            await self._incident(context, method, error)

    async def _incident(self, context: Context, method: str, error: BaseException) -> None:
        incident = secrets.token_hex(6)
        self._log.error("call failed unexpectedly", method=method, incident=incident, exc_info=error)
        await abort(context, internal("INTERNAL", "internal error", incident=incident))


def _code_name(context: Context) -> str:
    # The asyncio context gives a number where the interface says a StatusCode; 0 also while nothing is set.
    code: Any = context.code()
    if not code:
        return "OK"
    return code.name if isinstance(code, grpc.StatusCode) else Code(code).name


Serve: TypeAlias = Callable[[A, Context, "Caller | None"], Awaitable[R]]
"""Serves one call of a caller, who has been checked; None where nobody is."""


class _Around(Protocol):
    """Serves one call, from the first byte of ours to the last."""

    async def __call__(self, serve: Serve[A, R], asked: A, context: Context) -> R: ...


async def _send(context: Context, message: bytes) -> None:
    await context.write(message)


async def _send_whole(context: Context, message: bytes) -> None:
    """Send a message that an end of the call does not interrupt: gRPC takes no status while one is on its way."""
    sending = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(sending)
    except asyncio.CancelledError:
        await asyncio.wait([sending], timeout=_LAST_WORDS_S)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        raise


def _wrapped(
    handler: Handler, around: _Around, send: Callable[[Context, bytes], Coroutine[Any, Any, None]], gate: Gate | None
) -> Handler:
    parse, write = handler.request_deserializer, handler.response_serializer
    behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    takes_bytes = getattr(behavior, "takes_bytes", False)

    def read(raw: bytes, caller: Caller | None) -> Any:
        message: Any = raw if parse is None else _parsed(parse, raw)
        if caller is not None and gate is not None:
            gate.check_run(caller.token, message)
        return message

    async def read_all(raw: AsyncIterator[bytes], caller: Caller | None) -> AsyncGenerator[Any, None]:
        if takes_bytes:
            async for message in raw:
                if caller is not None:
                    read(message, caller)
                    caller = None
                yield message
        else:
            async for message in raw:
                yield read(message, caller)

    def encode(message: Any) -> bytes:
        # A servicer may have serialised a large message itself, with fewer copies.
        return message if write is None or isinstance(message, bytes) else write(message)

    async def answer(behavior: Any, request: Any, context: Context) -> bytes:
        answer = behavior(request, context)
        # Nearly always a coroutine, and asking whether something can be awaited is slow.
        if isinstance(answer, CoroutineType) or inspect.isawaitable(answer):
            answer = await answer
        return encode(answer)

    async def answer_all(behavior: Any, request: Any, context: Context) -> None:
        stream = behavior(request, context)
        # Closed here and not by the garbage collector, so that clean-up has run when the call has ended.
        async with aclosing(stream):
            async for message in stream:
                try:
                    await send(context, encode(message))
                except grpc.aio.InternalError as error:
                    raise _PeerGoneError from error

    if handler.request_streaming and handler.response_streaming:

        async def each(requests: AsyncIterator[bytes], context: Context, caller: Caller | None) -> None:
            async with aclosing(read_all(requests, caller)) as messages:
                await answer_all(handler.stream_stream, messages, context)

        async def stream_stream(requests: AsyncIterator[bytes], context: Context) -> None:
            await around(each, requests, context)

        return grpc.stream_stream_rpc_method_handler(stream_stream)
    if handler.request_streaming:

        async def joined(requests: AsyncIterator[bytes], context: Context, caller: Caller | None) -> bytes:
            async with aclosing(read_all(requests, caller)) as messages:
                return await answer(handler.stream_unary, messages, context)

        async def stream_unary(requests: AsyncIterator[bytes], context: Context) -> bytes:
            return await around(joined, requests, context)

        return grpc.stream_unary_rpc_method_handler(stream_unary)
    if handler.response_streaming:

        async def many(request: bytes, context: Context, caller: Caller | None) -> None:
            await answer_all(handler.unary_stream, read(request, caller), context)

        async def unary_stream(request: bytes, context: Context) -> None:
            await around(many, request, context)

        return grpc.unary_stream_rpc_method_handler(unary_stream)

    async def one(request: bytes, context: Context, caller: Caller | None) -> bytes:
        return await answer(handler.unary_unary, read(request, caller), context)

    async def unary_unary(request: bytes, context: Context) -> bytes:
        return await around(one, request, context)

    return grpc.unary_unary_rpc_method_handler(unary_unary)
