"""H50: SIGTERM, SIGINT and a second one, at the deployed services, with much at work."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import google_crc32c
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from services.runtime.permissions import Role
from services.runtime.statuses import from_rpc_error
from tests.buffer.helpers import Caller, output, result, seconds
from tests.deployed.site import RUN, Member, Site
from tests.deployed.test_health import watching
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncEngineClient, AsyncSchedulerClient, Unavailable
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

GRACE_S = 10.0
"""The services' own."""

BUSY_S = 20.0
"""What a machine with other things to do may add to it; the case says one second, for an unloaded one."""

PAYLOAD_BYTES = 4 << 20
PAYLOADS = 25


async def fill(caller: Caller) -> None:
    """A hundred megabytes, so that a checkpoint takes a while."""
    data = os.urandom(PAYLOAD_BYTES)
    for number in range(PAYLOADS):
        made = output(1.0)
        made.payload.ref.CopyFrom((await caller.put(data, google_crc32c.value(data))).ref)
        await caller.add(f"g{number}")
        await caller.finish(result(f"g{number}", 0, made))


def pid_one(member: Member) -> int:
    """The process that is 1 in a namespace of its own, as we see it."""
    children = Path(f"/proc/{member.pid}/task/{member.pid}/children").read_text().split()
    return int(children[0])


def can_be_pid_one() -> bool:
    if not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGTERM as PID 1"])
async def test_h50_a_buffer_with_a_hundred_waits_and_a_checkpoint_ends_in_order(site: Site, how: str) -> None:
    """Health goes first, every wait hears why, the checkpoint is whole or not there, and the exit code is 0."""
    buffer = site.member("buffer")
    if how.endswith("PID 1"):
        if not can_be_pid_one():
            pytest.skip("needs unshare --pid")
        buffer.before = ("unshare", "--pid", "--fork", "--kill-child")
    buffer.start()
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create()
        await fill(caller)
        waits = [caller.wait_call(1000, max_wait=600.0, progress_interval=seconds(0.5)) for _ in range(100)]
        for wait in waits:
            assert (await wait.read()).WhichOneof("event") == "progress"
        health = await watching(channel, "")
        saving = asyncio.ensure_future(caller.checkpoint("at-the-end"))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        os.kill(pid_one(buffer) if how.endswith("PID 1") else buffer.pid, signal.Signals[how.split()[0]])
        ends = await asyncio.gather(*map(_end_of, waits))
        assert set(ends) == {(grpc.StatusCode.UNAVAILABLE, "DRAINING")}
        assert await asyncio.to_thread(buffer.wait) == 0
        assert time.monotonic() - began < GRACE_S + 1 + BUSY_S
        assert (await health)[-1] == health_pb2.HealthCheckResponse.NOT_SERVING
        saved = not isinstance((await asyncio.gather(saving, return_exceptions=True))[0], BaseException)
    buffer.before = ()
    buffer.start()
    assert buffer.data_dir is not None
    assert not list(buffer.data_dir.rglob("*.part"))
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        infos = await caller.checkpoints()
        assert not saved or [info.checkpoint_id for info in infos] == ["at-the-end"]
        for info in infos:
            assert (await caller.verify(info.checkpoint_id)).counts.finished == PAYLOADS
        assert (await caller.depth()).sampleable == PAYLOADS


async def _end_of(wait: Any) -> tuple[object, str]:
    try:
        while await wait.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), from_rpc_error(error).reason
    return grpc.StatusCode.OK, ""


async def test_h50_a_second_sigterm_ends_the_buffer_at_once_and_costs_nothing(site: Site) -> None:
    """A person who presses twice means it. Parked uploads would use up the grace otherwise."""
    buffer = site.start("buffer").members["buffer"]
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        await caller.create()
        await fill(caller)
        goes_on = asyncio.Event()

        async def frames() -> AsyncIterator[buffer_pb2.PutPayloadRequest]:
            yield buffer_pb2.PutPayloadRequest(header=buffer_pb2.PutPayloadHeader(run_id=caller.run_id, size=1))
            await goes_on.wait()

        upload = asyncio.ensure_future(caller.stub.PutPayload(frames()))
        saving = asyncio.ensure_future(caller.checkpoint("cut"))
        health = await watching(channel, "")
        await asyncio.sleep(0.1)
        began = time.monotonic()
        buffer.send(signal.SIGTERM)
        assert (await health)[-1] == health_pb2.HealthCheckResponse.NOT_SERVING
        assert buffer.alive, "the upload has the grace"
        buffer.send(signal.SIGTERM)
        assert await asyncio.to_thread(buffer.wait) == 128 + signal.SIGTERM
        assert time.monotonic() - began < GRACE_S
        goes_on.set()
        await asyncio.gather(upload, saving, return_exceptions=True)
    buffer.start()
    async with site.channel(buffer.target) as channel:
        caller = Caller(channel)
        for info in await caller.checkpoints():
            assert (await caller.verify(info.checkpoint_id)).counts.finished == PAYLOADS
        assert (await caller.depth()).sampleable == PAYLOADS
        await caller.checkpoint("after")


async def test_h50_a_fan_out_that_a_stop_cuts_is_recorded_as_partial(site: Site) -> None:
    """One agent sleeps, the other hangs; whoever comes back has to see which."""
    site.member("engine", "--grace-s=3")
    for name in ("one", "two"):
        site.member("agent-hybrid", name=name, replicas=[f"{name}:hybrid"])
    for member in site.members.values():
        member.start()
    site.register()
    engine, hung = site.members["engine"], site.members["two"]
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        async with AsyncEngineClient(engine.target, site.options(Role.OPERATOR)) as client:
            request = engine_pb2.SleepRequest(run_id=RUN)
            sleeping = asyncio.ensure_future(client.calls.Sleep(request, timeout=30))
            while not (operations := await _operations(client)) or not _slept(operations[0], "one"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            began = time.monotonic()
            engine.send(signal.SIGTERM)
            assert await asyncio.to_thread(engine.wait) == 0
            assert time.monotonic() - began < 3 + 1 + BUSY_S
            sleeping.cancel()
            await asyncio.gather(sleeping, return_exceptions=True)
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    engine.start()
    async with AsyncEngineClient(engine.target, site.options(Role.OPERATOR)) as client:
        (operation,) = await _operations(client)
        assert operation.state == engine_pb2.OPERATION_STATE_PARTIAL
        codes = {outcome.replica_id: outcome.code for outcome in operation.outcomes}
        assert codes["one"] == 0
        assert codes["two"] != 0
        # Repeated, it acts on what is left.
        await client.calls.Sleep(engine_pb2.SleepRequest(run_id=RUN), timeout=30)


async def _operations(client: AsyncEngineClient) -> list[engine_pb2.Operation]:
    answer = await client.calls.ListOperations(engine_pb2.ListOperationsRequest(run_id=RUN))
    return list(answer.operations)


def _slept(operation: engine_pb2.Operation, replica_id: str) -> bool:
    return any(outcome.replica_id == replica_id and outcome.code == 0 for outcome in operation.outcomes)


async def test_h50_a_scheduler_with_an_open_run_ends_in_order(site: Site) -> None:
    """A watch is open, and its run too; waits of trainers that it parked are in tests/scheduler and tests/loop."""
    site.start("buffer", "engine", "scheduler")
    scheduler = site.members["scheduler"]
    options = site.options(Role.TRAINER)
    async with site.channel(site.members["buffer"].target) as channel:
        await Caller(channel, RUN).create()
    request = site.opening()
    async with AsyncSchedulerClient(scheduler.target, options) as client, site.channel(scheduler.target) as channel:
        epoch = (await client.calls.OpenRun(request)).epoch
        watch = client.calls.WatchRun(scheduler_pb2.WatchRunRequest(run_id=RUN, from_sequence=1))
        reading = asyncio.ensure_future(_all(watch))
        health = await watching(channel, "")
        assert epoch == 1
        began = time.monotonic()
        scheduler.send(signal.SIGINT)
        assert await asyncio.to_thread(scheduler.wait) == 0
        assert time.monotonic() - began < GRACE_S + 1 + BUSY_S
        assert (await health)[-1] == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(Unavailable):
            await reading
        scheduler.start()
        run = (await client.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=RUN))).run
        assert run.epoch == 1


async def _all(stream: Any) -> None:
    async for _ in stream:
        pass
