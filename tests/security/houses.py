"""The three services with tokens, in this process, and every call of theirs by its name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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

    def bound(self, channel: grpc.aio.Channel) -> Any:
        """The call over a channel; requests are bytes."""
        shape = f"{'stream' if self.streams_in else 'unary'}_{'stream' if self.streams_out else 'unary'}"
        return getattr(channel, shape)(self.path, response_deserializer=self.answer.FromString)

    async def code(
        self, channel: grpc.aio.Channel, raw: bytes | list[bytes], token: str | None = None, timeout: float = 10
    ) -> tuple[grpc.StatusCode, str]:
        """Send one message (or those of a stream) and return the status; a stream of answers ends after the first."""
        metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        messages = raw if isinstance(raw, list) else [raw]
        call = self.bound(channel)(
            iter(messages) if self.streams_in else messages[0], metadata=metadata, timeout=timeout
        )
        try:
            if self.streams_out:
                async for _ in call:
                    break
                else:
                    return await call.code(), ""
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        finally:
            call.cancel()
        return grpc.StatusCode.OK, ""


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
async def house(service: str, **settings: Any) -> AsyncIterator[tuple[ServiceHost, grpc.aio.Channel]]:
    """Host a service, and connect to it."""
    build, kind = _BUILDERS[service]
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with (
        build(kind(listen=["127.0.0.1:0"], grace_s=1, **settings)) as host,
        grpc.aio.insecure_channel(host.target, options=options) as channel,
    ):
        yield host, channel
