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

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from turnout.channels import channel_options
from turnout.client._options import ClientOptions

T = TypeVar("T")

_RECONNECT_MAX_S: Final = 1.0
"""A client is back about this long after its service."""


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


def arguments_of(target: str, options: ClientOptions) -> list[tuple[str, int | str]]:
    """Return the arguments of a channel, blocking or asyncio."""
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


def bind(channel: Any, method: Method) -> Any:
    """Return what makes the call over a channel, blocking or asyncio."""
    return getattr(channel, method.shape)(
        method.path,
        request_serializer=method.serializer,
        response_deserializer=method.deserializer,
        _registered_method=True,
    )
