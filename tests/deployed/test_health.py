"""H61: health and reflection of the deployed services, over TLS, through a life of each."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import Any

import google_crc32c
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.runtime.permissions import Role
from tests.buffer.helpers import Caller, result
from tests.deployed.site import RUN, SERVICES, Member, Site, until
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncSchedulerClient, Unavailable
from turnout.scheduler.v1 import scheduler_pb2

# The type stubs of these packages know no asyncio channels.
HealthStub: Any = health_pb2_grpc.HealthStub
ReflectionStub: Any = reflection_pb2_grpc.ServerReflectionStub
Status = health_pb2.HealthCheckResponse
NAMES = {
    "buffer": "turnout.buffer.v1.ReplayBuffer",
    "engine": "turnout.engine.v1.EngineController",
    "scheduler": "turnout.scheduler.v1.SwitchScheduler",
}


async def check(channel: grpc.aio.Channel, name: str = "") -> int:
    answer = await HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
    return int(answer.status)


async def watching(channel: grpc.aio.Channel, name: str) -> asyncio.Task[list[int]]:
    """Begin a watch of a health; what it tells until it ends."""
    watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
    told = [(await watch.read()).status]

    async def rest() -> list[int]:
        with suppress(grpc.aio.AioRpcError):
            while (answer := await watch.read()) is not grpc.aio.EOF:
                told.append(answer.status)
        return told

    return asyncio.create_task(rest())


async def listed(channel: grpc.aio.Channel) -> set[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in ReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=10):
        return {service.name for service in answer.list_services_response.service}
    return set()


async def test_h61_every_deployed_service_lists_itself_and_answers_for_its_names(ground: Site) -> None:
    """A balancer asks by name, a person asks what there is; health needs no token, reflection an operator's."""
    if not ground.members:
        ground.start(*SERVICES)
    for service in SERVICES:
        async with ground.channel(ground.members[service].target) as channel:
            assert {NAMES[service], "grpc.health.v1.Health"} <= await listed(channel)
            for name in ("", NAMES[service]):
                assert await check(channel, name) == Status.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(channel, "no.such.Service")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=10)
            assert (await watch.read()).status == Status.SERVICE_UNKNOWN
            watch.cancel()
        async with ground.channel(ground.members[service].target, Role.READER) as channel:
            assert await check(channel) == Status.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await listed(channel)
            # The second is the asyncio client's own word where a service ends a call that is written to.
            assert caught.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INTERNAL)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_h61_a_buffer_that_reads_its_journal_is_not_serving_yet(site: Site) -> None:
    """SERVING before the restore is over sends workers to a buffer that refuses them."""
    buffer = site.start("buffer").members["buffer"]
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create()
        for first in range(0, 40_000, 2000):
            names = [f"g{number}" for number in range(first, first + 2000)]
            await caller.add(*names)
            await caller.finish(*(result(name, 0) for name in names))
    buffer.kill()
    buffer.launch()
    told: list[int] = []
    async with asyncio.timeout(60):
        while Status.SERVING not in told:
            # A channel of its own each time: one that was refused pauses before it tries again.
            async with site.channel(buffer.target) as channel:
                with suppress(grpc.aio.AioRpcError):
                    told.append(await check(channel, NAMES["buffer"]))
    buffer.ready()
    assert set(told[:-1]) == {Status.NOT_SERVING}
    async with site.channel(buffer.target) as channel:
        assert (await Caller(channel).depth()).sampleable == 40_000


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_h61_a_draining_buffer_says_so_and_its_watches_end(site: Site, number: signal.Signals) -> None:
    """While an upload may finish within the grace, no balancer should send another; watchers must not hold it up."""
    buffer = site.start("buffer").members["buffer"]
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create()
        watches = [await watching(channel, name) for name in ("", NAMES["buffer"])]
        goes_on, begun = asyncio.Event(), asyncio.Event()

        async def frames() -> Any:
            yield buffer_pb2.PutPayloadRequest(header=buffer_pb2.PutPayloadHeader(run_id=RUN, size=1))
            begun.set()
            await goes_on.wait()
            yield buffer_pb2.PutPayloadRequest(chunk=b"x")
            yield buffer_pb2.PutPayloadRequest(end=buffer_pb2.PutPayloadEnd(crc32c=google_crc32c.value(b"x")))

        caller.run_id = RUN
        await caller.create()
        upload = asyncio.ensure_future(caller.stub.PutPayload(frames()))
        await begun.wait()
        await asyncio.sleep(0.3)  # the header has no answer of its own
        buffer.send(number)
        for watch in watches:
            assert (await watch)[-1] == Status.NOT_SERVING
        assert await check(channel, NAMES["buffer"]) == Status.NOT_SERVING
        goes_on.set()
        assert (await upload).ref.id
        assert await asyncio.to_thread(buffer.wait) == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_h61_a_dependency_that_is_down(site: Site) -> None:
    """The scheduler goes on for other runs, the controller has nobody behind it: a balancer is to see the second."""
    site.start(*SERVICES, "agent-standalone", engine=["--probe-interval=1", "--probe-timeout=1"])
    site.register()
    engine, scheduler = (site.members[name].target for name in ("engine", "scheduler"))
    async with site.channel(engine) as to_engine, site.channel(scheduler) as to_scheduler:
        assert await check(to_engine) == Status.SERVING
        assert await check(to_engine, f"{NAMES['engine']}/s0") == Status.SERVING
        for name in ("buffer", "agent-standalone"):
            site.members[name].kill()
        for _ in until(60):
            if await check(to_engine) == Status.NOT_SERVING:
                break
        assert await check(to_engine, f"{NAMES['engine']}/s0") == Status.NOT_SERVING
        request = scheduler_pb2.OpenRunRequest(
            run_id=RUN,
            config=scheduler_pb2.RunConfig(
                train_batch_size=2, parameter_sync_step=1, mini_batch_size=2, total_training_steps=1, group_size=1
            ),
            buffer_target=site.members["buffer"].target,
            engine_target=engine,
        )
        async with AsyncSchedulerClient(scheduler, site.options(Role.TRAINER)) as client:
            with pytest.raises(Unavailable, match="BUFFER_UNREACHABLE"):
                await client.calls.OpenRun(request, timeout=15)
        assert await check(to_scheduler) == Status.SERVING
        restart(site, "agent-standalone")
        for _ in until(60):
            if await check(to_engine) == Status.SERVING:
                break


def restart(site: Site, name: str) -> Member:
    return site.members[name].start()
