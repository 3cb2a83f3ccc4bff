"""A service with one method of each call shape, made of generic handlers, and clients for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from services.runtime.config import ServiceSettings
from services.runtime.host import HostContext, HostedService, ServiceHost

SERVICE = "turnout.test.v1.Probe"
Unary = Callable[[StringValue, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[StringValue]]
Stream = Callable[[StringValue, "grpc.aio.ServicerContext[Any, Any]"], AsyncIterator[StringValue]]


async def echo(request: StringValue, context: grpc.aio.ServicerContext[Any, Any]) -> StringValue:
    return request


async def letters(request: StringValue, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[StringValue]:
    for letter in request.value:
        yield StringValue(value=letter)


@dataclass
class Probe(HostedService):
    """What each method does is given by the test; hooks note that they ran."""

    context: HostContext
    unary: Unary = echo
    stream: Stream = letters
    on_start: Callable[[], Awaitable[None]] | None = None
    on_drain: Callable[[], Awaitable[None]] | None = None
    happened: list[str] = field(default_factory=list)
    full_names = (SERVICE,)

    def register(self, server: grpc.aio.Server) -> None:
        async def join(requests: AsyncIterator[StringValue], context: Any) -> StringValue:
            return await self.unary(StringValue(value="".join([request.value async for request in requests])), context)

        async def each(requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
            async for request in requests:
                async for answer in self.stream(request, context):
                    yield answer

        async def unary(request: StringValue, context: Any) -> StringValue:
            return await self.unary(request, context)

        async def stream(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
            async for answer in self.stream(request, context):
                yield answer

        def left_out(request: StringValue, context: Any) -> StringValue:
            # What the generated base class does for a method that is not overridden.
            context.set_code(grpc.StatusCode.UNIMPLEMENTED)
            raise NotImplementedError("Method not implemented!")

        codec = (StringValue.FromString, StringValue.SerializeToString)
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Unary": grpc.unary_unary_rpc_method_handler(unary, *codec),
            "Stream": grpc.unary_stream_rpc_method_handler(stream, *codec),
            "Join": grpc.stream_unary_rpc_method_handler(join, *codec),
            "Each": grpc.stream_stream_rpc_method_handler(each, *codec),
            "LeftOut": grpc.unary_unary_rpc_method_handler(left_out, *codec),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def start(self) -> None:
        self.happened.append("start")
        if self.on_start:
            await self.on_start()

    async def drain(self) -> None:
        self.happened.append("drain")
        if self.on_drain:
            await self.on_drain()

    async def close(self) -> None:
        self.happened.append("close")


def probe_host(*, settings: ServiceSettings | None = None, **behavior: Any) -> ServiceHost:
    """A host of a Probe on a free port of loopback."""
    return ServiceHost("probe", settings or ServiceSettings(grace_s=2), lambda context: Probe(context, **behavior))


class Caller:
    """Calls a Probe by method name, with text in and text out."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def _codec(self) -> dict[str, Any]:
        return {"request_serializer": encode, "response_deserializer": StringValue.FromString}

    def unary(self, value: str | bytes, method: str = "Unary", timeout: float = 10) -> Any:
        return self._channel.unary_unary(f"/{SERVICE}/{method}", **self._codec())(value, timeout=timeout)

    def stream(self, value: str | bytes, timeout: float | None = 10) -> Any:
        return self._channel.unary_stream(f"/{SERVICE}/Stream", **self._codec())(value, timeout=timeout)

    def join(self, values: list[str | bytes], timeout: float = 10) -> Any:
        return self._channel.stream_unary(f"/{SERVICE}/Join", **self._codec())(iter(values), timeout=timeout)

    def each(self, values: list[str | bytes], timeout: float = 10) -> Any:
        return self._channel.stream_stream(f"/{SERVICE}/Each", **self._codec())(iter(values), timeout=timeout)


def encode(value: str | bytes | Message) -> bytes:
    """Text as a message; bytes as they are, so that a test can send what is no message."""
    if isinstance(value, bytes):
        return value
    return (StringValue(value=value) if isinstance(value, str) else value).SerializeToString()
