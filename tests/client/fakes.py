"""Scripted services over real sockets, and proxies that misbehave.

A fake answers with what a test scripted and records what it was asked, so tests look at the wire instead of at mocks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from turnout.buffer.v1 import buffer_pb2
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

Handler = Callable[[Any, Any], Any]
"""Takes the request (for uploads: a list of requests) and the context; a stream handler returns an iterable."""

_SERVICES: dict[str, Any] = {
    "buffer": buffer_pb2.DESCRIPTOR.services_by_name["ReplayBuffer"],
    "engine": engine_pb2.DESCRIPTOR.services_by_name["EngineController"],
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["SwitchScheduler"],
}


def fail(context: Any, code: grpc.StatusCode, reason: str = "", **metadata: str) -> None:
    """End the call as a Turnout service does: status and one ErrorInfo."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason or code.name, domain="turnout", metadata=metadata))
    status = status_pb2.Status(code=code.value[0], message=f"scripted {reason or code.name}", details=[detail])
    context.abort_with_status(rpc_status.to_status(status))


def failing(code: grpc.StatusCode, reason: str = "", **metadata: str) -> Handler:
    """A handler that always fails."""
    return lambda request, context: fail(context, code, reason, **metadata)


def in_turn(*handlers: Handler) -> Handler:
    """A handler that behaves differently from call to call; the last one stays."""
    left = list(handlers)

    def handle(request: Any, context: Any) -> Any:
        handler = left.pop(0) if len(left) > 1 else left[0]
        return handler(request, context)

    return handle


@dataclass
class Asked:
    """One recorded call."""

    name: str
    request: Any
    remaining: float | None
    """Seconds to the deadline, as the server saw it."""
    peer: str


class FakeService:
    """One of the three services, scripted by call name; unscripted unary calls answer with an empty message."""

    def __init__(self, service: str, port: int = 0, log: list[Asked] | None = None) -> None:
        self.script: dict[str, Handler] = {}
        self.asked: list[Asked] = [] if log is None else log
        self._service = _SERVICES[service]
        self._changed = threading.Condition()
        self._port = port
        self._server: grpc.Server | None = None
        self.start()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        server = grpc.server(
            ThreadPoolExecutor(32),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.max_send_message_length", 64 << 20),
                ("grpc.http2.min_ping_interval_without_data_ms", 100),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
            ],
        )
        handlers = {method.name: self._handler(method) for method in self._service.methods}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(self._service.full_name, handlers)])
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        server.start()
        self._server = server

    def stop(self) -> None:
        """Cut everything off."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def requests(self, name: str) -> list[Any]:
        """What a call was asked, in order."""
        return [asked.request for asked in self.asked if asked.name == name]

    def names(self) -> list[str]:
        """Names of all calls, in order."""
        return [asked.name for asked in self.asked]

    def wait_for(self, name: str, times: int = 1, timeout: float = 10) -> None:
        """Block until a call was made that often."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.requests(name)) >= times, timeout):
                raise AssertionError(f"{name} was not called {times} times within {timeout} s: {self.names()}")

    def _handler(self, method: Any) -> grpc.RpcMethodHandler[Any, Any]:
        request_class, response_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)

        def answer(request: Any, context: Any) -> Any:
            if method.client_streaming:
                request = list(request)
            with self._changed:
                self.asked.append(Asked(method.name, request, context.time_remaining(), context.peer()))
                self._changed.notify_all()
            handler = self.script.get(method.name)
            if handler is not None:
                return handler(request, context)
            return [] if method.server_streaming else response_class()

        kind = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
        make = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
        behaviour = answer if kind[1] == "unary" else lambda request, context: iter(answer(request, context))
        made: grpc.RpcMethodHandler[Any, Any] = make(
            behaviour,
            request_deserializer=request_class.FromString,
            response_serializer=response_class.SerializeToString,
        )
        return made


@contextlib.contextmanager
def fake(service: str, log: list[Asked] | None = None) -> Iterator[FakeService]:
    """A fake for the length of a block."""
    made = FakeService(service, log=log)
    try:
        yield made
    finally:
        made.stop()


def until_cancelled(context: Any, *events: Any) -> Iterator[Any]:
    """Send events, then stay silent until the caller goes away."""
    gone = threading.Event()
    context.add_callback(gone.set)
    yield from events
    gone.wait()


class CuttingProxy:
    """A TCP proxy that ends connections which carried no byte for `idle_s`: with a reset, or by dropping silently."""

    def __init__(self, target: str, *, idle_s: float, silently: bool) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._idle_s = idle_s
        self._silently = silently
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        self._last: dict[int, float] = defaultdict(time.monotonic)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.cuts = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """End it, and all its threads."""
        self._closing.set()
        for one in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                continue
            self.connections += 1
            self._sockets += [near, far]
            self._last[id(near)] = time.monotonic()
            dropped = threading.Event()
            for job, arguments in (
                (self._pump, (near, far, near, dropped)),
                (self._pump, (far, near, near, dropped)),
                (self._watch, (near, far, dropped)),
            ):
                thread = threading.Thread(target=job, args=arguments, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, key: socket.socket, dropped: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not dropped.is_set():
                    self._last[id(key)] = time.monotonic()
                    sink.sendall(data)
        if not dropped.is_set():
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)

    def _watch(self, near: socket.socket, far: socket.socket, dropped: threading.Event) -> None:
        while not self._closing.wait(0.02):
            if time.monotonic() - self._last[id(near)] < self._idle_s:
                continue
            self.cuts += 1
            dropped.set()
            if not self._silently:
                for one in (near, far):
                    with contextlib.suppress(OSError):
                        # Linger 0 makes the close a reset.
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
                        one.shutdown(socket.SHUT_RDWR)
            return


@contextlib.contextmanager
def cutting_proxy(target: str, *, idle_s: float, silently: bool) -> Iterator[CuttingProxy]:
    """A proxy for the length of a block."""
    proxy = CuttingProxy(target, idle_s=idle_s, silently=silently)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.contextmanager
def silent_listener() -> Iterator[str]:
    """A target that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def events(*messages: Any) -> Callable[[Any, Any], Iterable[Any]]:
    """A stream handler that sends these messages and ends."""
    return lambda request, context: messages
