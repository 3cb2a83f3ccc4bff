"""The baseline of the buffer bench: a bare gRPC server with the shapes of the buffer's calls.

    python -P -m services.bench.bare_buffer DIRECTORY

Invariants: nothing but grpc.aio on uvloop: messages are bytes that nobody parses, answers are what the bench handed in
by `Answers`, so that both sides move the same bytes; waits are an asyncio.Event; each payload goes to a file of its own
in DIRECTORY by plain writes and, if asked for, one fdatasync at the end. The files stay, as payloads do in the buffer:
a file written over and over would find its pages in the cache already.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
import uvloop

SERVICE: Final = "/turnout.bench.BareBuffer/"
SYNC: Final = b"sync"
"""First message of a Put that asks for the disk to confirm it."""

CHUNK_BYTES: Final = 1 << 20
MAX_MESSAGE_BYTES: Final = 64 << 20
"""As the services have it by default."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class BareBuffer(grpc.GenericRpcHandler):
    """The calls."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written = 0
        self._answers: list[bytes] = []
        self._event = asyncio.Event()
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Answers": grpc.stream_unary_rpc_method_handler(self.set_answers),
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Stream": grpc.stream_stream_rpc_method_handler(self.stream),
            "Many": grpc.unary_stream_rpc_method_handler(self.many),
            "Wait": grpc.unary_stream_rpc_method_handler(self.wait),
            "Set": grpc.unary_unary_rpc_method_handler(self.set),
            "Put": grpc.stream_unary_rpc_method_handler(self.put),
            "Get": grpc.unary_stream_rpc_method_handler(self.get),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call."""
        return self._handlers.get(str(handler_call_details.method).removeprefix(SERVICE))

    @property
    def _newest(self) -> Path:
        return self._directory / f"bare-{self._written}"

    async def set_answers(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        """Answer with these from now on."""
        self._answers = [answer async for answer in requests]
        return b""

    async def unary(self, request: bytes, context: Context) -> bytes:
        """One answer."""
        return self._answers[0]

    async def stream(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """One answer to each request."""
        async for _ in requests:
            yield self._answers[0]

    async def many(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """All answers."""
        for answer in self._answers:
            yield answer

    async def wait(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """The first answer, and the last one once the event is set."""
        event = self._event
        yield self._answers[0]
        await event.wait()
        yield self._answers[-1]

    async def set(self, request: bytes, context: Context) -> bytes:
        """Wake all that wait."""
        self._event.set()
        self._event = asyncio.Event()
        return b""

    async def put(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        """Write what comes into a new file."""
        first = await anext(aiter(requests))
        self._written += 1
        descriptor = os.open(self._newest, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            async for chunk in requests:
                os.write(descriptor, chunk)
            if first == SYNC:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        return b""

    async def get(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """Read the newest file."""
        descriptor = os.open(self._newest, os.O_RDONLY)
        try:
            while chunk := os.read(descriptor, CHUNK_BYTES):
                yield chunk
        finally:
            os.close(descriptor)


async def _serve(directory: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((BareBuffer(directory),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"turnout bare listening on 127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(Path(sys.argv[1])))
