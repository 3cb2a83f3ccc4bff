"""Builds, starts, drains and stops one service: the same way in a process of its own and inside a test.

Invariants: the service answers only between the end of its start and the beginning of its stop; stopping goes health
NOT_SERVING, parked waits UNAVAILABLE, calls at work until the grace ends, background tasks cancelled, the service
closed; each happens once and none is skipped because another failed. A port or socket is never shared.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TypeAlias, cast

import grpc.aio
from grpc_channelz.v1 import channelz, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from services.runtime.addresses import Address, AddressError, check_free, parse_address
from services.runtime.clock import Clock, MonotonicClock
from services.runtime.config import ServiceSettings
from services.runtime.discovery import Discovery
from services.runtime.draining import Draining
from services.runtime.errors import describe
from services.runtime.guard import Guard, TokenLimits
from services.runtime.handlers import Handlers, InFlight
from services.runtime.health import METRICS, VERSION, Health
from services.runtime.identity import Identity, own_version
from services.runtime.logs import get_logger
from services.runtime.metrics import CallMetrics, LoopLag, new_registry
from services.runtime.metrics_server import MetricsServer
from services.runtime.tasks import Supervisor
from services.runtime.tls import ServerTls, TlsError
from services.runtime.tokens import TokenFile, TokensError
from services.runtime.tracing import Traces, TracingError

_HANDSHAKE_MS: Final = 10_000
"""gRPC's own two minutes would let silent connections hold their places for that long."""

_CLOSE_S: Final = 5.0
"""A close that takes longer than this hangs; it is reported and left behind so that the process can end."""


@dataclass(frozen=True)
class HostContext:
    """What a service gets from its host."""

    name: str
    clock: Clock
    draining: Draining
    tasks: Supervisor
    metrics: CollectorRegistry
    discovery: Discovery
    set_serving: Callable[[bool], None]
    """Report that the service cannot be used for now (False), or can again: its health tells, calls still arrive."""
    set_parts: Callable[[Mapping[str, bool]], None]
    """Report by name whether what the service depends on can be used: health answers for these names too."""


class HostedService(ABC):
    """What a service gives to its host."""

    full_names: tuple[str, ...]
    """Full names of its gRPC services, as in their protos."""

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers by their generated functions; nothing else may be asked of `server`."""

    async def start(self) -> None:  # noqa: B027 - a service with nothing to restore needs none
        """Restore state and start background tasks. Calls are UNAVAILABLE / STARTING until this returns."""

    async def drain(self) -> None:  # noqa: B027
        """Finish what must not be cut. `HostContext.draining` is set already; new calls may still arrive."""

    async def close(self) -> None:  # noqa: B027
        """Flush and release, also after a failed start. No call is at work and no background task runs any more."""


Build: TypeAlias = Callable[[HostContext], HostedService]


class StartError(Exception):
    """The service could not start; the message is one line for a person."""


class ServiceHost:
    """One running service. Use it as `async with`, or call `start` and `stop`."""

    def __init__(self, name: str, settings: ServiceSettings, build: Build, *, clock: Clock | None = None) -> None:
        self.name = name
        self.settings = settings
        self._log = get_logger(name)
        self._build = build
        self._clock = clock or MonotonicClock(settings.time_scale)
        self._addresses: list[Address] = []
        self._stopped: asyncio.Future[bool] | None = None

    @property
    def targets(self) -> list[str]:
        """Where it listens, as client targets, with the ports that the system gave."""
        return [str(address) for address in self._addresses]

    @property
    def target(self) -> str:
        """The first of `targets`."""
        return self.targets[0]

    @property
    def metrics_url(self) -> str | None:
        """Where the metrics are, if they are served."""
        return self._metrics_server.url if self._metrics_server else None

    async def __aenter__(self) -> ServiceHost:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, start the service and become SERVING. Raises StartError, with nothing left behind."""
        draining = Draining()
        self._health = Health(draining)
        self.context = HostContext(
            name=self.name,
            clock=self._clock,
            draining=draining,
            tasks=Supervisor(name=self.name, clock=self._clock),
            metrics=new_registry(),
            discovery=Discovery(self.name),
            set_serving=self._health.set_serving,
            set_parts=self._health.set_parts,
        )
        self._health.facts[VERSION] = own_version()
        self.context.metrics.register(Identity(self.name, lambda: self._health.status("") == Health.SERVING))
        self._in_flight = InFlight()
        try:
            self._tls, guard = self._server_tls(), self._guard()
            traces = Traces(self.name) if self.settings.traces else None
        except (TokensError, TlsError, TracingError) as error:
            raise StartError(str(error)) from error
        metrics = CallMetrics(self.context.metrics)
        self._handlers = Handlers(
            name=self.name, in_flight=self._in_flight, metrics=metrics, guard=guard, traces=traces
        )
        self._metrics_server: MetricsServer | None = None
        self.service = self._build(self.context)
        self._server = grpc.aio.server(options=_server_options(self.settings))
        self._register()
        try:
            self._listen()
            if guard is not None:
                self.context.tasks.supervise("tokens", guard.watching(self._in_flight.end))
            await self._server.start()
            await self.service.start()
        except BaseException as error:
            await self.stop(0)
            if isinstance(error, AddressError):
                raise StartError(str(error)) from error
            raise
        self._handlers.ready = True
        self._health.set_serving(True)

    async def stop(self, grace_s: float | None = None) -> bool:
        """Stop within `grace_s` wall seconds (default: that of the settings); calling it again joins the first.

        False if something did not end in order, which is logged.
        """
        if self._stopped is None:
            grace = self.settings.grace_s if grace_s is None else grace_s
            self._stopped = asyncio.ensure_future(self._stop(grace))
        # Cancelling one who waits for the stop must not cancel the stop.
        return await asyncio.shield(self._stopped)

    async def _stop(self, grace_s: float) -> bool:
        ends = time.monotonic() + grace_s
        self.context.draining.set()
        in_order = not self._handlers.ready or await self._step("drain", self.service.drain(), grace_s)
        await self._in_flight.end_infrastructure()
        # gRPC would take no more calls from here on, and whoever asks for the health would be cut off.
        self._handlers.ending = True
        await self._in_flight.finish(max(0.0, ends - time.monotonic()))
        remaining = max(0.0, ends - time.monotonic())
        # gRPC returns before the clean-up of the handlers that it cut has run, hence the second line.
        in_order &= await self._step("stop serving", self._server.stop(remaining), remaining + _CLOSE_S)
        in_order &= await self._in_flight.wait_empty(_CLOSE_S)
        in_order &= await self._step("stop background tasks", self.context.tasks.close(), _CLOSE_S)
        in_order &= await self._step("close", self.service.close(), _CLOSE_S)
        if self._metrics_server:
            await asyncio.to_thread(self._metrics_server.close)
        return in_order

    async def _step(self, what: str, work: Awaitable[None], timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await work
        except TimeoutError:
            self._log.error("did not end in time", step=what, seconds=timeout)
        except Exception as error:
            self._log.exception("failed while stopping", step=what, error=describe(error))
        else:
            return True
        return False

    def _register(self) -> None:
        # Generated code adds a servicer to anything that takes handlers as a server does.
        methods = cast(grpc.aio.Server, self._handlers)
        self.service.register(methods)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, methods)
        channelz_pb2_grpc.add_ChannelzServicer_to_server(channelz.aio.ChannelzServicer(), methods)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (*self.service.full_names, health_name, "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME)
        reflector = reflection.aio.ReflectionServicer(names)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflector, methods)  # type: ignore[no-untyped-call]
        self._server.add_generic_rpc_handlers((self._handlers,))
        self._health.add(self.service.full_names)

    def _guard(self) -> Guard | None:
        settings = self.settings
        if settings.tokens_file is None:
            return None
        limits = TokenLimits(settings.token_calls_per_s, settings.token_calls_at_work)
        return Guard(TokenFile(settings.tokens_file), limits, time.monotonic)

    def _server_tls(self) -> ServerTls | None:
        settings = self.settings
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        return ServerTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)

    def _listen(self) -> None:
        for text in self.settings.listen:
            address = parse_address(text)
            check_free(address)
            try:
                if self._tls is None or address.path:
                    port = self._server.add_insecure_port(str(address))
                else:
                    port = self._server.add_secure_port(str(address), self._tls.credentials())
            except RuntimeError as error:
                raise AddressError(f"cannot listen on {address}") from error
            self._addresses.append(address.with_port(port).for_clients())
        if self.settings.metrics_listen is not None:
            address = parse_address(self.settings.metrics_listen)
            self._metrics_server = MetricsServer(address, self.context.metrics, self.context.discovery, self._tls)
            self._health.facts[METRICS] = self._metrics_server.url.removesuffix("/metrics")
            self.context.tasks.supervise("event loop lag", LoopLag(self.context.metrics).loop)


def _server_options(settings: ServiceSettings) -> list[tuple[str, int]]:
    keepalive_ms, timeout_ms = round(settings.keepalive_s * 1000), round(settings.keepalive_timeout_s * 1000)
    return [
        # With it two servers on one port share its connections, without an error.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_concurrent_streams", settings.max_streams),
        # Of calls that begin faster than they are taken up, gRPC would cancel some at random beyond a thousand.
        ("grpc.server.max_pending_requests", settings.max_streams),
        ("grpc.server.max_pending_requests_hard_limit", settings.max_streams),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # The option that a peer's silence is measured by; the one above alone is not enough.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients ping too; without these they would be cut off for pinging too often.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ]
