"""H57: servers that come later, restart, or accept and stay silent."""

from __future__ import annotations

import threading
import time

import pytest

from tests.client.fakes import FakeService, events, fake, free_port, silent_listener, until_cancelled
from tests.client.real import real_buffer
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, BufferClient, ClientOptions, DeadlineExceeded, Timeouts, duration

REQUEST = buffer_pb2.GetRunRequest(run_id="r1")
WAIT = buffer_pb2.WaitForSampleableRequest(run_id="r1", partition="train", step=1, target=1, max_wait=duration(30))


def test_h57_a_client_may_come_before_its_server() -> None:
    """Everything of a cluster job starts at once; the order must not matter. Shipped options."""
    port = free_port()
    with BufferClient(f"127.0.0.1:{port}") as client:
        services: list[FakeService] = []
        timer = threading.Timer(2.0, lambda: services.append(FakeService("buffer", port)))
        timer.start()
        client.calls.GetRun(REQUEST)
        timer.join()
        services[0].stop()
        assert len(services[0].requests("GetRun")) == 1


def test_h57_calls_and_waits_recover_within_seconds_of_the_server_s_return() -> None:
    """gRPC's own back-off grows to two minutes; the shipped client has to be back within 5 s."""
    with fake("buffer") as service, BufferClient(service.target) as client:
        client.calls.GetRun(REQUEST)
        service.script["WaitForSampleable"] = lambda request, context: until_cancelled(context)
        outcomes: list[int] = []
        waiting = threading.Thread(target=lambda: outcomes.append(client.wait_for_sampleable(WAIT).outcome))
        waiting.start()
        service.wait_for("WaitForSampleable")
        service.stop()
        time.sleep(3)  # an outage long enough for the back-off to grow
        done = buffer_pb2.WaitDone(outcome=buffer_pb2.WAIT_OUTCOME_REACHED)
        service.script["WaitForSampleable"] = events(buffer_pb2.WaitForSampleableResponse(done=done))
        service.start()
        returned = time.monotonic()
        client.calls.GetRun(REQUEST)
        waiting.join(20)
        assert time.monotonic() - returned < 10
        assert outcomes == [buffer_pb2.WAIT_OUTCOME_REACHED]
        # Armed again once, neither lost nor doubled.
        assert len(service.requests("WaitForSampleable")) == 2


@pytest.mark.parametrize("asynchronously", [False, True])
async def test_h57_a_silent_listener_ends_in_deadline_exceeded(asynchronously: bool) -> None:
    """A peer that accepts and never speaks must not queue calls for ever."""
    options = ClientOptions(timeouts=Timeouts(call=2.0, attempt=1.0, grace=0.5))
    with silent_listener() as target:
        began = time.monotonic()
        if asynchronously:
            async with AsyncBufferClient(target, options) as client:
                with pytest.raises(DeadlineExceeded):
                    await client.calls.GetRun(REQUEST)
        else:
            with BufferClient(target, options) as blocking:
                with pytest.raises(DeadlineExceeded):
                    blocking.calls.GetRun(REQUEST)
                short = buffer_pb2.WaitForSampleableRequest()
                short.CopyFrom(WAIT)
                short.max_wait.CopyFrom(duration(0.5))
                with pytest.raises(DeadlineExceeded):
                    blocking.wait_for_sampleable(short)
        assert time.monotonic() - began < 15


async def test_h57_a_restart_is_visible_to_the_caller() -> None:
    """A caller that keeps state about the server has to notice that the server forgot."""
    request = buffer_pb2.CreateRunRequest(run_id="r1")
    async with real_buffer() as host:
        listen = host.target
        async with AsyncBufferClient(listen) as client:
            await client.calls.CreateRun(request)
            first = await client.incarnation("r1")
            assert await client.incarnation("r1") == first
            await host.stop(0)
            async with real_buffer(listen):
                await client.calls.CreateRun(request)
                assert await client.incarnation("r1") not in ("", first)
