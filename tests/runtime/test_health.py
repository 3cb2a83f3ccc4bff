"""Health and reflection through the life of a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.runtime.errors import Code
from services.runtime.handlers import Handlers, InFlight
from services.runtime.host import ServiceHost
from services.runtime.metrics import CallMetrics, new_registry
from services.runtime.statuses import from_rpc_error
from tests.runtime.helpers import SERVICE, Caller, Probe, probe_host

# The type stubs of these packages know no asyncio channels.
HealthStub: Any = health_pb2_grpc.HealthStub
ReflectionStub: Any = reflection_pb2_grpc.ServerReflectionStub
ChannelzStub: Any = channelz_pb2_grpc.ChannelzStub
Response = health_pb2.HealthCheckResponse


async def _check(stub: Any, service: str) -> int:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return int(answer.status)


async def test_h61_health_follows_the_life_of_the_service() -> None:
    """A balancer that sends calls to a service which restores or drains loses them."""
    restore, drain = asyncio.Event(), asyncio.Event()
    restoring = asyncio.Event()

    async def start() -> None:
        restoring.set()
        await restore.wait()

    host = probe_host(on_start=start, on_drain=drain.wait)
    starting = asyncio.create_task(host.start())
    await restoring.wait()
    async with grpc.aio.insecure_channel(host.target) as channel:
        stub = HealthStub(channel)
        for name in ("", SERVICE):
            assert await _check(stub, name) == Response.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Caller(channel).unary("x")
        assert (from_rpc_error(caught.value).code, from_rpc_error(caught.value).reason) == (
            Code.UNAVAILABLE,
            "STARTING",
        )
        restore.set()
        await starting
        for name in ("", SERVICE):
            assert await _check(stub, name) == Response.SERVING
        host.context.set_serving(False)
        assert await _check(stub, SERVICE) == Response.NOT_SERVING
        host.context.set_serving(True)
        assert await _check(stub, SERVICE) == Response.SERVING
        stopping = asyncio.create_task(host.stop())
        await host.context.draining.wait()
        for name in ("", SERVICE):
            assert await _check(stub, name) == Response.NOT_SERVING
        drain.set()
        assert await stopping is True


async def test_h61_unknown_services_are_told_apart() -> None:
    """NOT_FOUND and SERVICE_UNKNOWN are what the health protocol promises."""
    async with probe_host() as host, grpc.aio.insecure_channel(host.target) as channel:
        stub = HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _check(stub, "no.such.Service")
        assert from_rpc_error(caught.value).code is Code.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert (await watch.read()).status == Response.SERVICE_UNKNOWN
        watch.cancel()


async def test_h61_a_part_has_a_health_of_its_own() -> None:
    """One dead engine of several leaves its agent usable, and whoever watches that engine hears of no other."""
    async with probe_host() as host, grpc.aio.insecure_channel(host.target) as channel:
        stub = HealthStub(channel)
        host.context.set_parts({"x/1": True, "x/2": True})
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="x/1"))
        seen = [(await watch.read()).status]
        host.context.set_parts({"x/1": True, "x/2": False})
        assert [await _check(stub, name) for name in ("x/1", "x/2", SERVICE)] == [
            Response.SERVING,
            Response.NOT_SERVING,
            Response.SERVING,
        ]
        for parts in ({"x/1": False}, {}):
            host.context.set_parts(parts)
            seen.append((await watch.read()).status)
        watch.cancel()
    assert seen == [Response.SERVING, Response.NOT_SERVING, Response.SERVICE_UNKNOWN]


async def test_h61_watchers_hear_the_stop_and_do_not_delay_it() -> None:
    """A Watch stream never ends by itself, so each one would hold a stop until the grace is over."""
    host = probe_host()
    await host.start()
    async with grpc.aio.insecure_channel(host.target) as channel:
        watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        reflect = ReflectionStub(channel).ServerReflectionInfo()
        await reflect.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await reflect.read()).HasField("list_services_response")
        seen = [(await watch.read()).status]
        # A grace far beyond the test's time limit: only a stop that does not wait for watchers passes.
        assert await host.stop(grace_s=1000) is True
        while (message := await watch.read()) is not grpc.aio.EOF:
            seen.append(message.status)
    assert seen == [Response.SERVING, Response.NOT_SERVING]


async def test_a_call_that_is_ended_while_it_sends_gets_its_status() -> None:
    """gRPC takes no status while a message is on its way: the call would stay open, and the stop with it."""
    sent = asyncio.Event()
    told: list[str] = []

    class Slow:
        """A context whose messages take a moment to leave."""

        def code(self) -> None:
            return None

        async def write(self, message: bytes) -> None:
            sent.set()
            await asyncio.sleep(0.05)
            told.append("message")

        async def abort_with_status(self, status: Any) -> None:
            told.append(status.code.name)
            raise grpc.aio.AbortError

    async def one(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request

    in_flight = InFlight()
    handlers = Handlers(name="probe", in_flight=in_flight, metrics=CallMetrics(new_registry()))
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(one)
    handlers.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("grpc.probe", {"One": method})])

    details = SimpleNamespace(method="/grpc.probe/One")
    handler: Any = handlers.service(cast(grpc.HandlerCallDetails, details))
    call = asyncio.ensure_future(handler.unary_stream(b"x", Slow()))
    await sent.wait()
    await in_flight.end_infrastructure()
    with pytest.raises(grpc.aio.AbortError):
        await call
    assert told == ["message", "UNAVAILABLE"]


async def _services(host: ServiceHost) -> set[str]:
    async with grpc.aio.insecure_channel(host.target) as channel:
        call = ReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        async for answer in call:
            return {service.name for service in answer.list_services_response.service}
    return set()


async def test_h61_reflection_lists_every_service_and_health() -> None:
    """grpcurl shows nothing of a service that reflection leaves out."""
    async with probe_host() as host:
        assert await _services(host) == {
            SERVICE,
            "grpc.health.v1.Health",
            "grpc.channelz.v1.Channelz",
            "grpc.reflection.v1alpha.ServerReflection",
        }


async def test_channelz_sees_the_server() -> None:
    """It is how a connection that hangs is looked at from outside."""
    async with probe_host() as host, grpc.aio.insecure_channel(host.target) as channel:
        answer = await ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest(), timeout=5)
    assert answer.server


async def test_a_service_that_fails_to_start_leaves_nothing_behind() -> None:
    """Its port must be free for the next attempt, and what it opened closed."""

    async def fail() -> None:
        raise OSError("no journal")

    host = probe_host(on_start=fail)
    with pytest.raises(OSError, match="no journal"):
        await host.start()
    assert isinstance(host.service, Probe)
    assert host.service.happened == ["start", "close"]
