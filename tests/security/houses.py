"""The three services with tokens, in this process, and every call of theirs by its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from services.buffer.service import build as build_buffer
from services.buffer.settings import BufferSettings
from services.engine.service import build as build_engine
from services.engine.settings import EngineSettings
from services.runtime.config import ServiceSettings
from services.runtime.host import ServiceHost
from services.runtime.permissions import Role
from services.runtime.tokens import digest, make_token
from services.scheduler.service import build as build_scheduler
from services.scheduler.settings import SchedulerSettings
from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

DESCRIPTORS: Final = {
    "buffer": buffer_pb2.DESCRIPTOR.services_by_name["ReplayBuffer"],
    "engine": engine_pb2.DESCRIPTOR.services_by_name["EngineController"],
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["SwitchScheduler"],
}
_BUILDERS: Final[Mapping[str, tuple[Callable[..., ServiceHost], type[ServiceSettings]]]] = {
    "buffer": (build_buffer, BufferSettings),
    "engine": (build_engine, EngineSettings),
    "scheduler": (build_scheduler, SchedulerSettings),
}


@dataclass(frozen=True)
class Call:
    """One call of the contract."""

    path: str
    """/package.Service/Method."""
    request: type[Message]
    answer: type[Message]
    streams_in: bool
    streams_out: bool

    def bound(self, channel: grpc.aio.Channel | grpc.Channel) -> Any:
        """The call over a channel; requests are bytes."""
        shape = f"{'stream' if self.streams_in else 'unary'}_{'stream' if self.streams_out else 'unary'}"
        return getattr(channel, shape)(self.path, response_deserializer=self.answer.FromString)

    async def code(
        self,
        line: Line,
        raw: bytes | list[bytes],
        token: str | None = None,
        timeout: float = 10,
        metadata: tuple[tuple[str, str | bytes], ...] = (),
    ) -> tuple[grpc.StatusCode, str]:
        """Send one message (or those of a stream) and return the status; a stream of answers ends after the first."""
        if token is not None:
            metadata = (*metadata, ("authorization", f"Bearer {token}"))
        messages = raw if isinstance(raw, list) else [raw]
        if self.streams_in:
            return await asyncio.to_thread(self._send_stream, line.blocking, messages, metadata, timeout)
        call = self.bound(line.aio)(messages[0], metadata=metadata, timeout=timeout)
        try:
            if self.streams_out and await call.read() is not grpc.aio.EOF:
                return grpc.StatusCode.OK, ""
            return await call.code(), await call.details() or ""
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        finally:
            call.cancel()

    def _send_stream(
        self, channel: grpc.Channel, messages: list[bytes], metadata: Any, timeout: float
    ) -> tuple[grpc.StatusCode, str]:
        # The asyncio client says INTERNAL of its own where the service ends a call that is written to.
        call = self.bound(channel)
        try:
            if not self.streams_out:
                call(iter(messages), metadata=metadata, timeout=timeout)
            else:
                next(call(iter(messages), metadata=metadata, timeout=timeout), None)
        except grpc.RpcError as error:
            ended = cast(grpc.Call, error)
            return ended.code(), ended.details() or ""
        return grpc.StatusCode.OK, ""


@dataclass(frozen=True)
class Line:
    """The connections to one service."""

    aio: grpc.aio.Channel
    blocking: grpc.Channel


@asynccontextmanager
async def connected(target: str) -> AsyncIterator[Line]:
    """Connect to a service; nothing is too large to be sent to it."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
    ]
    with grpc.insecure_channel(target, options) as blocking:
        async with grpc.aio.insecure_channel(target, options=options) as aio:
            yield Line(aio, blocking)


def calls(service: str) -> Iterator[Call]:
    """Every call of `buffer`, `engine` or `scheduler`."""
    method: MethodDescriptor
    for method in DESCRIPTORS[service].methods:
        yield Call(
            f"/{DESCRIPTORS[service].full_name}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
            method.client_streaming,
            method.server_streaming,
        )


@dataclass(frozen=True)
class Tokens:
    """A tokens file with one token of each role, good for `run`, and one of each for all runs."""

    path: Path
    run: str = "mine"

    def write(self, *, without: frozenset[Role] = frozenset()) -> Path:
        """Write the file."""
        lines = []
        for role in Role:
            if role not in without:
                lines.append(f"- {{id: {role}, role: {role}, run: {self.run}, sha256: '{self._hash(self.of(role))}'}}")
            lines.append(f"- {{id: all-{role}, role: {role}, all_runs: true, sha256: '{self._hash(self.all(role))}'}}")
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines))
        new.replace(self.path)
        return self.path

    def of(self, role: Role) -> str:
        """The token of a role for `run`."""
        return make_token(str(role), f"{role}-of-one-run")

    def all(self, role: Role) -> str:
        """The token of a role for all runs."""
        return make_token(f"all-{role}", f"{role}-of-all-runs")

    @staticmethod
    def _hash(token: str) -> str:
        return digest(token).hex()


@asynccontextmanager
async def house(service: str, **settings: Any) -> AsyncIterator[tuple[ServiceHost, Line]]:
    """Host a service, and connect to it."""
    build, kind = _BUILDERS[service]
    async with (
        build(kind(listen=["127.0.0.1:0"], grace_s=1, **settings)) as host,
        connected(host.target) as line,
    ):
        yield host, line
