"""How a service stops, inside a test's process."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.clock import Clock
from services.runtime.config import ServiceSettings
from services.runtime.draining import Draining
from services.runtime.host import ServiceHost, StartError
from services.runtime.statuses import from_rpc_error
from services.runtime.waits import Wake, park
from tests.runtime.helpers import Caller, Probe, encode, probe_host
from tests.security.houses import Tokens

Context = grpc.aio.ServicerContext[Any, Any]


@asynccontextmanager
async def _stopping_at_work() -> AsyncIterator[tuple[ServiceHost, grpc.aio.Channel]]:
    """A host that begins to stop with a call at work, and the way to it; in the end the call may finish, and has to."""
    entered, finish = asyncio.Event(), asyncio.Event()

    async def slow(request: StringValue, context: Context) -> StringValue:
        entered.set()
        await finish.wait()
        return request

    host = probe_host(settings=ServiceSettings(grace_s=30), unary=slow)
    await host.start()
    async with grpc.aio.insecure_channel(host.target) as channel:
        call = Caller(channel).unary("x")
        await entered.wait()
        stopping = asyncio.create_task(host.stop())
        yield host, channel
        finish.set()
        assert (await call).value == "x"
        assert await stopping is True


def _parking_host(settings: ServiceSettings, cleaned: list[str]) -> ServiceHost:
    """Its stream parks for ever; it answers the value "here" once it is parked."""

    def build(context: Any) -> Probe:
        draining: Draining = context.draining
        clock: Clock = context.clock

        async def stream(request: StringValue, _: Context) -> AsyncIterator[StringValue]:
            try:
                yield StringValue(value="here")
                await park(Wake(), clock.now() + 3600, clock=clock, draining=draining)
            finally:
                cleaned.append(request.value)

        return Probe(context, stream=stream)

    return ServiceHost("probe", settings, build)


async def test_h50_parked_waits_end_unavailable_and_hold_nothing_up() -> None:
    """With a hundred trainers and workers waiting, a stop must neither hang until the grace nor cut them off bare."""
    cleaned: list[str] = []
    host = _parking_host(ServiceSettings(grace_s=1000), cleaned)
    await host.start()
    async with grpc.aio.insecure_channel(host.target) as channel:
        waits = [Caller(channel).stream(str(number), timeout=None) for number in range(100)]
        for wait in waits:
            assert (await wait.read()).value == "here"
        assert await host.stop() is True
        assert len(cleaned) == 100, "clean-up of the handlers had not run when the stop returned"
        for wait in waits:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wait.read()
            assert from_rpc_error(caught.value).reason == "DRAINING"
    assert isinstance(host.service, Probe)
    assert host.service.happened == ["start", "drain", "close"]


async def test_h50_calls_at_work_may_finish_within_the_grace() -> None:
    """A checkpoint that is half done when SIGTERM comes should be a whole one."""
    async with _stopping_at_work() as (host, _):
        await host.context.draining.wait()


async def test_h61_health_is_told_while_calls_at_work_use_up_the_grace() -> None:
    """A probe that is cut off says nothing; new calls are to go elsewhere, or to the next process."""
    async with _stopping_at_work() as (host, channel):
        while not host._handlers.ending:  # noqa: ASYNC110 - nothing announces the end of the drain
            await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Caller(channel).unary("y")
        assert from_rpc_error(caught.value).reason == "DRAINING"
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_h37_a_burst_of_calls_is_taken_whole() -> None:
    """Of more than a thousand that begin at once gRPC cancels some at random: a worker's requests, a trainer's call."""

    async def echo(request: StringValue, context: Context) -> StringValue:
        return request

    async with probe_host(unary=echo) as host, grpc.aio.insecure_channel(host.target) as channel:
        calls = [Caller(channel).unary(str(number)) for number in range(3000)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [answer for answer in answers if isinstance(answer, BaseException)] == []


async def test_h50_a_call_that_outlasts_the_grace_is_cut_and_cleaned_up() -> None:
    """gRPC returns from its stop before the handlers that it cancelled have run their clean-up."""
    entered = asyncio.Event()
    cleaned: list[str] = []

    async def stuck(request: StringValue, context: Context) -> StringValue:
        try:
            entered.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            cleaned.append("stuck")
        return request

    host = probe_host(unary=stuck)
    await host.start()
    async with grpc.aio.insecure_channel(host.target) as channel:
        call = Caller(channel).unary("x")
        await entered.wait()
        assert await host.stop(grace_s=0.1) is True
        assert cleaned == ["stuck"]
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_a_failing_hook_does_not_skip_the_rest() -> None:
    """A drain that raises must not leave the journal unflushed and the port open."""

    async def fail() -> None:
        raise RuntimeError("drain")

    host = probe_host(on_drain=fail)
    await host.start()
    assert await host.stop() is False
    assert await host.stop() is False, "a second stop joins the first"
    assert isinstance(host.service, Probe)
    assert host.service.happened == ["start", "drain", "close"]


async def test_h47_two_hosts_cannot_share_a_port() -> None:
    """By default gRPC lets two servers bind one port, and clients reach one or the other."""
    async with probe_host() as host:
        with pytest.raises(StartError, match="address in use"):
            await probe_host(settings=ServiceSettings(listen=[host.target])).start()
        async with probe_host() as other:
            assert other.target != host.target
    async with probe_host(settings=ServiceSettings(listen=[host.target])) as again:
        assert again.target == host.target


async def test_h56_every_printed_address_is_a_client_target(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts read the address and connect to it as it stands."""
    monkeypatch.chdir(tmp_path)
    listen = ["127.0.0.1:0", "localhost:0", "0.0.0.0:0", "unix:probe.sock"]
    if _has_ipv6():
        listen += ["[::1]:0", "[::]:0"]
    settings = ServiceSettings(listen=listen, insecure=True, grace_s=1)
    async with probe_host(settings=settings) as host:
        assert len(host.targets) == len(listen)
        for target in host.targets:
            async with grpc.aio.insecure_channel(target) as channel:
                assert (await Caller(channel).unary("x")).value == "x"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


async def test_metrics_count_calls_by_method_and_code() -> None:
    """Two services in one process must not share or refuse each other's series."""
    settings = ServiceSettings(metrics_listen="127.0.0.1:0", grace_s=1)
    async with probe_host(settings=settings) as host, probe_host(settings=settings) as other:
        async with grpc.aio.insecure_channel(host.target) as channel:
            caller = Caller(channel)
            await caller.unary("x")
            async for _ in caller.stream("abc"):
                pass
            for value, method in ((b"\xff", "Unary"), (encode("x"), "NoSuch")):
                with pytest.raises(grpc.aio.AioRpcError):
                    await caller.unary(value, method)
        assert host.metrics_url
        assert other.metrics_url
        text = await asyncio.to_thread(_scrape, host.metrics_url)
        quiet = await asyncio.to_thread(_scrape, other.metrics_url)
        unused = await asyncio.to_thread(_scrape, host.metrics_url)
    prefix = 'turnout_calls_total{code="%s",method="/turnout.test.v1.Probe/%s"}'
    for code, method, count in (("OK", "Unary", 1.0), ("OK", "Stream", 1.0), ("INVALID_ARGUMENT", "Unary", 1.0)):
        assert f"{prefix % (code, method)} {count}" in text
    assert 'turnout_calls_in_flight{method="/turnout.test.v1.Probe/Unary"} 0.0' in text
    assert "NoSuch" not in text, "a client could make any number of series"
    assert "turnout_event_loop_lag_seconds_count" in text
    assert "process_cpu_seconds_total" in text
    assert "Probe" not in quiet
    assert unused


async def test_a_metrics_port_in_use_is_a_start_error() -> None:
    """It must not take the service down with a traceback, nor leave its gRPC port open."""
    settings = ServiceSettings(metrics_listen="127.0.0.1:0", grace_s=1)
    async with probe_host(settings=settings) as host:
        assert host.metrics_url
        taken = host.metrics_url.removeprefix("http://").removesuffix("/metrics")
        clash = probe_host(settings=ServiceSettings(metrics_listen=taken, grace_s=1))
        with pytest.raises(StartError, match="address in use"):
            await clash.start()


async def test_a_start_that_fails_over_tls_leaves_no_task_behind(tmp_path: Path) -> None:
    """Who embeds a service and corrects its files would have the tokens watched by the failed start, for ever."""
    tokens = Tokens(tmp_path / "tokens.yaml").write()
    none = tmp_path / "none.pem"
    before = asyncio.all_tasks()
    with pytest.raises(StartError, match=r"none\.pem"):
        await probe_host(settings=ServiceSettings(tokens_file=tokens, tls_cert=none, tls_key=none)).start()
    assert asyncio.all_tasks() == before


class Blackhole:
    """A TCP proxy that can stop passing bytes without closing anything, as a pulled cable does."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._open = asyncio.Event()
        self._open.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Blackhole:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.target = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    def swallow(self) -> None:
        """From now on pass nothing."""
        self._open.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, upstream_writer]
        for source, sink in ((reader, upstream_writer), (upstream_reader, writer)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self._open.wait()
            sink.write(data)
            await sink.drain()


async def test_h48_a_peer_that_is_gone_without_a_word_is_found_in_seconds() -> None:
    """A half-open connection would keep its parked wait, and what that holds, until the service is restarted."""
    cleaned = asyncio.Event()

    async def stream(request: StringValue, context: Context) -> AsyncIterator[StringValue]:
        try:
            yield StringValue(value="here")
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    settings = ServiceSettings(keepalive_s=1, keepalive_timeout_s=1, grace_s=1)
    async with (
        probe_host(settings=settings, stream=stream) as host,
        Blackhole(host.target) as proxy,
        grpc.aio.insecure_channel(proxy.target) as channel,
    ):
        call = Caller(channel).stream("x", timeout=None)
        assert (await call.read()).value == "here"
        proxy.swallow()
        await asyncio.wait_for(cleaned.wait(), 30)
        call.cancel()
