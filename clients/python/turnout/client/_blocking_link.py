"""Calls over blocking stubs.

Invariant: there is no event loop, so every await of its coroutines blocks the calling thread and then completes.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import grpc

from turnout.channels import metadata_of, proxy_hint
from turnout.client import _fork
from turnout.client._errors import TurnoutError, from_rpc_error
from turnout.client._link import LinkClosed, Method, Stream, StreamCut, arguments_of, bind
from turnout.client._options import ClientOptions

T = TypeVar("T")


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
                self._callables[method.path] = bind(channel, method)
            return self._callables[method.path]

    def _open(self) -> grpc.Channel:
        security = self._options.security
        credentials = security.credentials(self.target)
        arguments = [*arguments_of(self.target, self._options), *security.options(self.target)]
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
