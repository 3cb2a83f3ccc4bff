"""Calls over asyncio stubs.

Invariant: one link serves one event loop, that of its first call, and says so when another one uses it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from turnout.channels import connect, metadata_of, proxy_hint
from turnout.client import _fork
from turnout.client._errors import from_rpc_error
from turnout.client._link import LinkClosed, Method, Stream, StreamCut, arguments_of, bind
from turnout.client._options import ClientOptions

T = TypeVar("T")

_CLOSE_S: Final = 1.0
"""Calls still at work when an asyncio client is closed get this long to end."""


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
            self._callables[method.path] = bind(channel, method)
        return self._callables[method.path]

    def _open(self) -> grpc.aio.Channel:
        arguments = arguments_of(self.target, self._options)
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
