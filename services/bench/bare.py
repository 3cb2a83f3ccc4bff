"""The baseline of the idle bench: a bare gRPC server that parks every call.

    python -P -m services.bench.bare

Invariants: nothing but grpc.aio: no interceptors, no health, no timers; keepalive as the services have it by default,
since answering pings is part of being idle.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Final

import grpc
import grpc.aio
import uvloop

METHOD: Final = "/turnout.bench.Bare/Park"


class _Park(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Park every call of the one method."""
        return grpc.unary_unary_rpc_method_handler(_park) if handler_call_details.method == METHOD else None


async def _park(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    await asyncio.Event().wait()
    return request


async def _serve() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = grpc.aio.server(options=[("grpc.keepalive_time_ms", 10_000), ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((_Park(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"turnout bare listening on 127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
