"""H53: clients in several event loops and threads of one process."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

from tests.client.fakes import FakeService, fake
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, BufferClient

REQUEST = buffer_pb2.GetRunRequest(run_id="r1")
CALLS = 500


def asynchronously(service: FakeService, calls: int) -> None:
    async def call() -> None:
        async with AsyncBufferClient(service.target) as client:
            for _ in range(calls):
                await client.calls.GetRun(REQUEST)

    asyncio.run(call())


def blocking(service: FakeService, calls: int) -> None:
    with BufferClient(service.target) as client:
        for _ in range(calls):
            client.calls.GetRun(REQUEST)


def test_h53_two_loops_and_a_blocking_client_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """grpc.aio shares one poller between loops: calls must not get lost, and stderr must stay quiet."""
    with fake("buffer") as service:
        threads = [
            threading.Thread(target=kind, args=(service, CALLS)) for kind in (asynchronously, asynchronously, blocking)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert len(service.asked) == 3 * CALLS
    noise = capfd.readouterr().err
    assert "BlockingIOError" not in noise
    assert "Traceback" not in noise


def test_h53_one_loop_after_the_other() -> None:
    """Scripts call asyncio.run() more than once."""
    with fake("buffer") as service:
        asynchronously(service, 3)
        asynchronously(service, 3)
        assert len(service.asked) == 6


def test_h53_closed_clients_leave_nothing_behind() -> None:
    """A job that makes a client per step must not run out of file descriptors in the night."""

    def open_things() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with fake("buffer") as service:
        for kind in (asynchronously, blocking):
            kind(service, 1)
        before = open_things()
        for _ in range(50):
            asynchronously(service, 1)
            blocking(service, 1)
        # The fake's own sockets close a moment after the client's.
        for _ in range(100):
            after = open_things()
            if after[0] <= before[0] + 2:
                break
            threading.Event().wait(0.05)
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + 32
