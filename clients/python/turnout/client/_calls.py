"""Every call of a service with deadlines, retries, one request id across attempts, and typed errors.

A `CallChannel` takes the place of a gRPC channel under a generated stub, so that all calls of the contract get the same
treatment and keep the types of the stub.

Invariants: a unary call always has a deadline; only UNAVAILABLE, and what the service says when to repeat, is retried;
a mutation carries one request id from its first attempt to its last, given by the caller or made here; the caller's
message is never changed; what is raised is a TurnoutError. Calls that stream answers are not retried here: waits and
watches arm themselves again one layer up.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from turnout.client._errors import TurnoutError, is_retryable
from turnout.client._link import Link, Method, Stream, run_blocking
from turnout.client._options import ClientOptions
from turnout.client._retry import Attempts

_LONG_POLLS: Final = frozenset({"ClaimGroups", "ExchangeRendezvous"})
"""Unary calls that wait for something up to their max_wait."""

_TRANSITIONS: Final = frozenset(
    {
        # Buffer: as long as the disk needs.
        "Checkpoint",
        "Restore",
        "VerifyCheckpoint",
        # Engine: as long as the slowest replica needs.
        "Register",
        "Sleep",
        "WakeUp",
        "ReleaseKvCache",
        "ResumeKvCache",
        "Pause",
        "Resume",
        "ResetCaches",
        "CollectiveRpc",
        "BeginLend",
        "FinishLend",
        "AbortLend",
        "Reclaim",
        "BeginWeightUpdate",
        "CommitWeightUpdate",
        "AbortWeightUpdate",
        # Scheduler: contain some of the above.
        "OpenRun",
        "CloseRun",
        "BeginStep",
        "EndStep",
        "BeginValidation",
        "CompleteLend",
        "AbandonLend",
        "Save",
    }
)
"""Calls that answer when something slow is done. Repeating one joins it."""

_DEFAULT_RENDEZVOUS_S: Final = 30.0
"""ExchangeRendezvous waits this long unless max_wait says otherwise."""

MAX_WAIT_S: Final = 30 * 86_400.0
"""The services cap waits here; so does the client, since a longer deadline overflows."""


def seconds(duration: Duration) -> float:
    """Return a Duration in seconds, capped at `MAX_WAIT_S`."""
    return min(duration.seconds + duration.nanos / 1e9, MAX_WAIT_S)


def duration(value: float) -> Duration:
    """Return seconds as a Duration, cut to what the services take. Raises ValueError for NaN."""
    if math.isnan(value):
        raise ValueError("NaN is no duration")
    nanos = round(min(max(value, 0.0), MAX_WAIT_S) * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def new_request_id() -> str:
    """Return an id that no other call has."""
    return uuid.uuid4().hex


class CallPolicy:
    """What a client decides once for all its calls."""

    def __init__(self, link: Link, options: ClientOptions, rng: random.Random) -> None:
        self.link = link
        self.options = options
        self.rng = rng

    def attempts(self, name: str, request: Any, timeout: float | None) -> Attempts:
        """Return the attempts of a unary call; `timeout` replaces the total."""
        times = self.options.timeouts
        total, attempt = times.call, times.attempt
        if name in _LONG_POLLS:
            total += _max_wait(name, request)
            attempt = total
        elif name in _TRANSITIONS:
            total = attempt = times.transition
        if timeout is not None:
            total = timeout
        return Attempts(self.options.retry, self.rng, now=self.link.now(), total=total, attempt=attempt)


def _max_wait(name: str, request: Any) -> float:
    if request.HasField("max_wait"):
        return seconds(request.max_wait)
    return _DEFAULT_RENDEZVOUS_S if name == "ExchangeRendezvous" else 0.0


def with_request_id(request: Any) -> Any:
    """Return the request, a copy with an id if it can have one and has none."""
    field = request.DESCRIPTOR.fields_by_name.get("request_id")
    if field is None or request.request_id:
        return request
    copy = type(request)()
    copy.CopyFrom(request)
    copy.request_id = new_request_id()
    return copy


class UnaryCall:
    """A call with one request and one answer."""

    def __init__(self, policy: CallPolicy, method: Method) -> None:
        self._policy = policy
        self._method = method
        self._name = method.path.rpartition("/")[2]

    async def __call__(self, request: Any, timeout: float | None = None) -> Any:
        """Make the call, with retries. `timeout` is the total in seconds."""
        link = self._policy.link
        request = with_request_id(request)
        attempts = self._policy.attempts(self._name, request, timeout)
        ends_waiting = link.now() + _max_wait(self._name, request) if self._name in _LONG_POLLS else None
        while True:
            try:
                return await link.unary(self._method, request, attempts.timeout(link.now()))
            except TurnoutError as error:
                pause = attempts.pause(link.now(), error.retry_after) if is_retryable(error) else None
                if pause is None:
                    raise
            await link.sleep(pause)
            if ends_waiting is not None:
                request = _with_max_wait(request, ends_waiting - link.now())


def _with_max_wait(request: Any, left: float) -> Any:
    copy = type(request)()
    copy.CopyFrom(request)
    copy.max_wait.CopyFrom(duration(left))
    return copy


class UploadCall:
    """A call with many requests and one answer. It is not retried: only the caller can make the frames again."""

    def __init__(self, policy: CallPolicy, method: Method) -> None:
        self._policy = policy
        self._method = method

    async def __call__(self, request: Any, timeout: float | None = None) -> Any:
        """Send the frames."""
        total = self._policy.options.timeouts.transfer if timeout is None else timeout
        return await self._policy.link.unary(self._method, request, total)


class Messages:
    """The answers of a streaming call, to be iterated over once; `cancel` ends it early."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return await self._stream.next()

    def cancel(self) -> None:
        """End the call."""
        self._stream.cancel()

    def cut(self) -> None:
        """End the call, from any thread; the iteration raises StreamCut."""
        self._stream.cut()


class StreamCall:
    """A call with many answers."""

    def __init__(self, policy: CallPolicy, method: Method) -> None:
        self._policy = policy
        self._method = method

    def __call__(self, request: Any, timeout: float | None = None) -> Messages:
        """Begin the call. Without `timeout` it lasts as long as the service and the network let it."""
        return Messages(self._policy.link.stream(self._method, request, timeout))


class CallChannel:
    """What a generated stub takes for a channel."""

    def __init__(self, policy: CallPolicy) -> None:
        self._policy = policy

    def unary_unary(self, path: str, **how: Any) -> Any:
        """Used by the stub."""
        name = path.rpartition("/")[2]
        return UnaryCall(self._policy, _method("unary_unary", path, how, waiting=name in _LONG_POLLS))

    def unary_stream(self, path: str, **how: Any) -> Any:
        """Used by the stub."""
        return StreamCall(self._policy, _method("unary_stream", path, how, waiting=True))

    def stream_unary(self, path: str, **how: Any) -> Any:
        """Used by the stub."""
        return UploadCall(self._policy, _method("stream_unary", path, how, waiting=False))

    def stream_stream(self, path: str, **how: Any) -> Any:
        """Used by the stub."""
        return StreamCall(self._policy, _method("stream_stream", path, how, waiting=False))


class BlockingCallChannel(CallChannel):
    """The same for a stub whose calls block."""

    def unary_unary(self, path: str, **how: Any) -> Any:
        """Used by the stub."""
        return _blocking(super().unary_unary(path, **how))

    def unary_stream(self, path: str, **how: Any) -> Any:
        """Used by the stub."""
        return _blocking_stream(super().unary_stream(path, **how))

    def stream_unary(self, path: str, **how: Any) -> Any:
        """Used by the stub."""
        return _blocking(super().stream_unary(path, **how))

    def stream_stream(self, path: str, **how: Any) -> Any:
        """Used by the stub."""
        return _blocking_stream(super().stream_stream(path, **how))


class BlockingMessages:
    """The answers of a streaming call, to be iterated over once; `cancel` ends it early, from any thread."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return run_blocking(self._messages.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def cancel(self) -> None:
        """End the call."""
        self._messages.cancel()


def _blocking(call: UnaryCall | UploadCall) -> Callable[..., Any]:
    def blocking(request: Any, timeout: float | None = None) -> Any:
        return run_blocking(call(request, timeout))

    return blocking


def _blocking_stream(call: StreamCall) -> Callable[..., BlockingMessages]:
    def blocking(request: Any, timeout: float | None = None) -> BlockingMessages:
        return BlockingMessages(call(request, timeout))

    return blocking


def _method(shape: str, path: str, how: dict[str, Any], *, waiting: bool) -> Method:
    return Method(path, shape, how["request_serializer"], how["response_deserializer"], waiting)
