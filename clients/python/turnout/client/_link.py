"""The connection to one service, blocking or asyncio, behind one shape.

Everything above this module is written once, as coroutines over a `Link`. Over an `AsyncLink` they are ordinary
coroutines. Over a `BlockingLink` each await blocks the calling thread and then completes at once, so `run_blocking` can
drive the same coroutine without an event loop: user callbacks run on the caller's thread.

Invariants: nothing is opened before the first call; a link has one channel for waits and one for everything else, so
that parked waits never stand in the way of the call that releases them; loopback targets never go through a proxy; an
asyncio link serves one event loop and says so when another one uses it; a forked child opens channels of its own, or
is told at once that it cannot.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakSet

import grpc
import grpc.aio

from turnout.channels import channel_options, connect, metadata_of, proxy_hint
from turnout.client import _fork
from turnout.client._errors import TurnoutError, from_rpc_error
from turnout.client._options import ClientOptions

T = TypeVar("T")

_RECONNECT_MAX_S: Final = 1.0
"""A client is back about this long after its service."""

_CLOSE_S: Final = 1.0
"""Calls still at work when an asyncio client is closed get this long to end."""


@dataclass(frozen=True, slots=True)
class Method:
    """One call of the contract, as the generated stub describes it."""

    path: str
    shape: str
    """unary_unary, unary_stream, stream_unary or stream_stream."""
    serializer: Callable[[Any], bytes]
    deserializer: Callable[[bytes], Any]
    waiting: bool
    """Whether it goes over the channel of the waits."""


class Stream(Protocol):
    """Messages that arrive one by one; ends with StopAsyncIteration or a TurnoutError."""

    async def next(self) -> Any:
        """Return the next message."""
        ...

    def cancel(self) -> None:
        """End the call, if it has not ended."""
        ...

    def cut(self) -> None:
        """End the call, from any thread: `next` raises StreamCut, unless it has ended before."""
        ...


class Link(Protocol):
    """What the calls need of the world."""

    target: str

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Pause."""
        ...

    async def invoke(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the user; over an asyncio link it may be a coroutine function."""
        ...

    async def blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that may block for long."""
        ...

    async def unary(self, method: Method, request: Any, timeout: float) -> Any:
        """Make a call with one answer. `request` is a message, or an iterable of messages. Raises TurnoutError."""
        ...

    def stream(self, method: Method, request: Any, timeout: float | None) -> Stream:
        """Make a call with many answers."""
        ...

    async def close(self) -> None:
        """Close both channels; calls at work end CANCELLED."""
        ...


class StreamCut(Exception):
    """A stream was ended by `Stream.cut`."""


class LinkClosed(RuntimeError):
    """The client was closed."""

    def __init__(self, target: str) -> None:
        super().__init__(f"the client of {target} is closed")


def _arguments(target: str, options: ClientOptions) -> list[tuple[str, int | str]]:
    arguments = channel_options(
        target,
        max_message_bytes=options.max_message_bytes,
        keepalive_s=options.keepalive.interval,
        keepalive_timeout_s=options.keepalive.timeout,
        reconnect_s=_RECONNECT_MAX_S,
    )
    # The client retries by itself, with one request id.
    return [*arguments, ("grpc.enable_retries", 0)]


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose every await blocks, on this thread."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking client awaited something that needs an event loop")


def iterate_blocking(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Iterate over an async generator whose every await blocks, on this thread."""
    try:
        while True:
            try:
                item = run_blocking(_next(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_blocking(items.aclose())


async def _next(items: AsyncGenerator[T, None]) -> T:
    # Not `anext(items)`: a coroutine may not end with StopIteration, and this one ends with StopAsyncIteration.
    return await items.__anext__()


def _bind(channel: Any, method: Method) -> Any:
    """Return what makes the call over a channel, blocking or asyncio."""
    return getattr(channel, method.shape)(
        method.path,
        request_serializer=method.serializer,
        response_deserializer=method.deserializer,
        _registered_method=True,
    )


class _AtWork:
    """A call that waits for its answer."""


class BlockingLink:
    """A link over blocking stubs: it has no event loop, and may be used from any number of threads."""

    asynchronous = False

    def __init__(self, target: str, options: ClientOptions) -> None:
        self.target = target
        self._options = options
        self._lock = threading.Lock()
        self._channels: dict[bool, grpc.Channel] = {}
        self._callables: dict[str, Any] = {}
        self._closed = False
        self._at_work: WeakSet[object] = WeakSet()
        _fork.watch(self)

    @property
    def is_open(self) -> bool:
        """Whether it has a channel."""
        return bool(self._channels)

    @property
    def is_busy(self) -> bool:
        """Whether a call is at work."""
        return bool(self._at_work)

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop here

    async def invoke(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call on this thread."""
        answer = function(*arguments)
        if inspect.iscoroutine(answer):
            answer.close()
            raise TypeError(f"{function!r} is a coroutine function; a blocking client needs a plain one")
        return answer

    async def blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call on this thread."""
        return function(*arguments)

    async def unary(self, method: Method, request: Any, timeout: float) -> Any:
        """Make a call with one answer, blocking."""
        argument = request if method.shape == "unary_unary" else iter(request)
        call = self._callable(method)
        at_work = _AtWork()
        self._at_work.add(at_work)
        try:
            return call(argument, timeout=timeout, metadata=metadata_of(self._options.security))
        except grpc.RpcError as error:
            raise self.explain(error) from error
        finally:
            self._at_work.discard(at_work)

    def stream(self, method: Method, request: Any, timeout: float | None) -> Stream:
        """Make a call with many answers."""
        argument = request if method.shape == "unary_stream" else iter(request)
        call = self._callable(method)(argument, timeout=timeout, metadata=metadata_of(self._options.security))
        stream = _BlockingStream(call, self)
        self._at_work.add(stream)
        return stream

    def ended(self, stream: _BlockingStream) -> None:
        """A stream has come to its end."""
        self._at_work.discard(stream)

    def explain(self, error: grpc.RpcError) -> TurnoutError | LinkClosed:
        """Return what a failed call means."""
        if self._closed:
            return LinkClosed(self.target)
        return from_rpc_error(error, hint=proxy_hint(self.target, os.environ))

    async def close(self) -> None:
        """Close both channels."""
        with self._lock:
            channels, self._channels, self._closed = list(self._channels.values()), {}, True
            self._callables.clear()
        for channel in channels:
            channel.close()

    def forget(self) -> list[Any]:
        """Used by `_fork`, in the child."""
        # A thread that stayed behind may hold the lock.
        self._lock, self._at_work = threading.Lock(), WeakSet()
        channels, self._channels, self._callables = list(self._channels.values()), {}, {}
        return channels

    def _callable(self, method: Method) -> Any:
        with self._lock:
            if self._closed:
                raise LinkClosed(self.target)
            if method.path not in self._callables:
                channel = self._channels.get(method.waiting)
                if channel is None:
                    channel = self._channels[method.waiting] = self._open()
                self._callables[method.path] = _bind(channel, method)
            return self._callables[method.path]

    def _open(self) -> grpc.Channel:
        security = self._options.security
        credentials = security.credentials(self.target)
        arguments = [*_arguments(self.target, self._options), *security.options(self.target)]
        _fork.opening(self)
        if credentials is not None:
            return grpc.secure_channel(self.target, credentials, options=arguments)
        return grpc.insecure_channel(self.target, options=arguments)


class _BlockingStream:
    def __init__(self, call: Any, link: BlockingLink) -> None:
        self._call = call
        self._link = link
        self._cut = False

    async def next(self) -> Any:
        try:
            return next(self._call)
        except StopIteration:
            self._link.ended(self)
            # A coroutine must not end with StopIteration.
            raise StopAsyncIteration from None
        except grpc.RpcError as error:
            self._link.ended(self)
            if self._cut and error.code() is grpc.StatusCode.CANCELLED:
                raise StreamCut from error
            raise self._link.explain(error) from error

    def cancel(self) -> None:
        self._call.cancel()
        self._link.ended(self)

    def cut(self) -> None:
        self._cut = True
        self._call.cancel()


class AsyncLink:
    """A link over asyncio stubs, for the event loop of its first call."""

    asynchronous = True

    def __init__(self, target: str, options: ClientOptions) -> None:
        self.target = target
        self._options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: dict[bool, grpc.aio.Channel] = {}
        self._callables: dict[str, Any] = {}
        self._closed = False
        _fork.watch(self)

    @property
    def is_open(self) -> bool:
        """Whether it has a channel."""
        return bool(self._channels)

    @property
    def is_busy(self) -> bool:
        """Being open is enough: gRPC's asyncio half does not survive a fork at rest either."""
        return self.is_open

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run for a while."""
        await asyncio.sleep(seconds)

    async def invoke(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call, and await the answer if it can be."""
        answer = function(*arguments)
        return await answer if inspect.isawaitable(answer) else answer

    async def blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call on another thread."""
        return await asyncio.to_thread(function, *arguments)

    async def unary(self, method: Method, request: Any, timeout: float) -> Any:
        """Make a call with one answer."""
        call = self._callable(method)(request, timeout=timeout, metadata=metadata_of(self._options.security))
        try:
            return await call
        except asyncio.CancelledError:
            self.explain_cancellation()
            raise
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, hint=proxy_hint(self.target, os.environ)) from error

    def stream(self, method: Method, request: Any, timeout: float | None) -> Stream:
        """Make a call with many answers."""
        call = self._callable(method)(request, timeout=timeout, metadata=metadata_of(self._options.security))
        return _AsyncStream(call, self)

    async def close(self) -> None:
        """Close both channels."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        self._callables.clear()
        for channel in channels:
            await channel.close(_CLOSE_S)

    def explain_cancellation(self) -> None:
        """Raise LinkClosed if a call was cancelled by `close` and not by cancelling the task that made it."""
        task = asyncio.current_task()
        if self._closed and not (task and task.cancelling()):
            raise LinkClosed(self.target)

    def forget(self) -> list[Any]:
        """Used by `_fork`, in the child."""
        channels, self._channels, self._callables, self._loop = list(self._channels.values()), {}, {}, None
        return channels

    def _callable(self, method: Method) -> Any:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise LinkClosed(self.target)
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(
                f"the client of {self.target} belongs to another event loop; make one client per loop, "
                "or use the blocking client, which any thread may use"
            )
        if method.path not in self._callables:
            channel = self._channels.get(method.waiting)
            if channel is None:
                channel = self._channels[method.waiting] = self._open()
            self._callables[method.path] = _bind(channel, method)
        return self._callables[method.path]

    def _open(self) -> grpc.aio.Channel:
        arguments = _arguments(self.target, self._options)
        _fork.opening(self)
        return connect(self.target, arguments, self._options.security)


class _AsyncStream:
    def __init__(self, call: Any, link: AsyncLink) -> None:
        self._call = call
        self._messages = aiter(call)
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._cut = False

    async def next(self) -> Any:
        try:
            return await anext(self._messages)
        except asyncio.CancelledError as error:
            self._link.explain_cancellation()
            task = asyncio.current_task()
            if self._cut and not (task and task.cancelling()):
                raise StreamCut from error
            raise
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, hint=proxy_hint(self._link.target, os.environ)) from error

    def cancel(self) -> None:
        self._call.cancel()

    def cut(self) -> None:
        self._cut = True
        self._loop.call_soon_threadsafe(self._call.cancel)
