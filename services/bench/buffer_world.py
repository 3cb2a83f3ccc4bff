"""The two servers of the buffer bench, and raw calls on them.

Invariants: the buffer runs as `serve` runs it, the bare server beside it, each in a process of its own; both are called
with bytes, so that the cost of the client is the same on both sides.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import grpc.aio

from services.bench.bare_buffer import MAX_MESSAGE_BYTES, SERVICE
from services.processes.child import Child, ChildSpec
from services.processes.fleet import Fleet
from services.processes.service import service_spec
from services.runtime.journal import Durability
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.buffer.v1 import buffer_pb2_grpc

OURS: Final = "/turnout.buffer.v1.ReplayBuffer/"

Unary: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
Down: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"
Up: TypeAlias = "grpc.aio.StreamUnaryMultiCallable[bytes, bytes]"
Both: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"


def connect(target: str) -> grpc.aio.Channel:
    """A connection of its own."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    return grpc.aio.insecure_channel(target, options=options)


@dataclass
class Side:
    """One server with a connection to it."""

    child: Child
    channel: grpc.aio.Channel
    prefix: str

    @property
    def pid(self) -> int:
        """Its process."""
        return self.child.process.pid

    def unary(self, name: str) -> Unary:
        """A call with one request and one answer."""
        return self.channel.unary_unary(self.prefix + name)

    def down(self, name: str) -> Down:
        """A call with many answers."""
        return self.channel.unary_stream(self.prefix + name)

    def up(self, name: str) -> Up:
        """A call with many requests."""
        return self.channel.stream_unary(self.prefix + name)

    def both(self, name: str) -> Both:
        """A call with many of both."""
        return self.channel.stream_stream(self.prefix + name)


@dataclass
class World:
    """Both servers."""

    fleet: Fleet
    ours: Side
    bare: Side

    @property
    def stub(self) -> buffer_pb2_grpc.ReplayBufferAsyncStub:
        """The buffer's calls with messages, for what is not measured."""
        return buffer_pb2_grpc.ReplayBufferStub(self.ours.channel)

    async def answers(self, messages: Iterable[bytes]) -> None:
        """Let the bare server answer with these."""

        async def each() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        await self.bare.up("Answers")(each())

    async def create(self, request: pb.CreateRunRequest) -> None:
        """Make a run."""
        await self.stub.CreateRun(request)

    async def drop(self, run_id: str) -> None:
        """Delete a run."""
        await self.stub.DeleteRun(pb.DeleteRunRequest(run_id=run_id))


def buffer_spec(directory: Path, durability: Durability) -> ChildSpec:
    """The buffer as `serve` runs it."""
    return service_spec(
        "buffer",
        *("--listen", "127.0.0.1:0"),
        *("--metrics-listen", "127.0.0.1:0"),
        *("--log-level", "warning"),
        *("--data-dir", str(directory / "data")),
        *("--durability", durability.value),
    )


@asynccontextmanager
async def world(directory: Path, durability: Durability = Durability.OS) -> AsyncIterator[World]:
    """Both servers, with their files in `directory`."""
    async with Fleet() as fleet:
        specs = buffer_spec(directory, durability), ChildSpec("bare", "services.bench.bare_buffer", (str(directory),))
        ours, bare = await fleet.start_all(*specs)
        async with connect(ours.target) as to_ours, connect(bare.target) as to_bare:
            yield World(fleet, Side(ours, to_ours, OURS), Side(bare, to_bare, SERVICE))
