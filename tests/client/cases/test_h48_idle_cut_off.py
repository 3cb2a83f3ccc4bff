"""H48: load balancers cut connections that carry no bytes for a while."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from tests.client.fakes import CuttingProxy, cutting_proxy, fake
from tests.client.real import real_buffer
from turnout.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from turnout.client import AsyncBufferClient, BufferClient, ClientOptions, Keepalive, RetryPolicy, duration

IDLE_S = 0.5
"""Ten times as impatient as the strictest proxy that was reported."""

PINGED_IDLE_S = 2.0
"""For tests in which pings keep the connection alive: gRPC pings once a second at most."""

PINGING = ClientOptions(keepalive=Keepalive(interval=1.0, timeout=1.0))
SILENT = ClientOptions(keepalive=Keepalive(interval=60.0, timeout=60.0), retry=RetryPolicy(initial=0.01, maximum=0.05))
NOTICING = ClientOptions(keepalive=Keepalive(interval=1.0, timeout=0.3), retry=RetryPolicy(initial=0.01, maximum=0.05))

REACHED = buffer_pb2.WaitForSampleableResponse(done=buffer_pb2.WaitDone(outcome=buffer_pb2.WAIT_OUTCOME_REACHED))


def request(wait: float = 30) -> buffer_pb2.WaitForSampleableRequest:
    return buffer_pb2.WaitForSampleableRequest(
        run_id="r1", partition="train", step=1, target=1, max_wait=duration(wait)
    )


def answered_after(condition: threading.Event) -> Any:
    """A wait that sends nothing at all until the condition holds."""

    def handle(asked: Any, context: Any) -> Any:
        gone = threading.Event()
        context.add_callback(gone.set)
        while not condition.wait(0.02) and not gone.is_set():
            pass
        if not gone.is_set():
            yield REACHED

    return handle


def test_h48_the_default_keepalive_is_below_the_strictest_reported_proxy() -> None:
    """The tests below shrink the times; this one ties them to the real ones: 5 s without a byte."""
    assert ClientOptions().keepalive.interval < 5


@pytest.mark.parametrize("silently", [False, True], ids=["reset", "drop"])
def test_h48_pings_keep_the_connection_of_a_silent_wait_alive(silently: bool) -> None:
    """The shipped client gets its answer over the first connection, however long the wait is silent."""
    answer = threading.Event()
    with fake("buffer") as service, cutting_proxy(service.target, idle_s=PINGED_IDLE_S, silently=silently) as proxy:
        service.script["WaitForSampleable"] = answered_after(answer)
        timer = threading.Timer(2 * PINGED_IDLE_S, answer.set)
        timer.start()
        with BufferClient(proxy.target, PINGING) as client:
            assert client.wait_for_sampleable(request()).outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        timer.join()
        assert proxy.connections == 1
        assert len(service.requests("WaitForSampleable")) == 1


def test_h48_a_reset_wait_is_armed_again() -> None:
    """Without pings the connection is cut again and again; the wait survives it, once at a time."""
    answer = threading.Event()
    with fake("buffer") as service, cutting_proxy(service.target, idle_s=IDLE_S, silently=False) as proxy:
        service.script["WaitForSampleable"] = answered_after(answer)
        timer = threading.Timer(3.5 * IDLE_S, answer.set)
        timer.start()
        with BufferClient(proxy.target, SILENT) as client:
            assert client.wait_for_sampleable(request()).outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        timer.join()
        assert proxy.cuts >= 2
        waits = [one.max_wait.seconds + one.max_wait.nanos / 1e9 for one in service.requests("WaitForSampleable")]
        assert len(waits) >= 3
        assert waits == sorted(waits, reverse=True)


def test_h48_a_connection_that_is_dropped_silently_is_noticed() -> None:
    """No reset arrives; only an unanswered ping tells, and it has to be noticed in seconds, not after a minute."""
    answer = threading.Event()
    with fake("buffer") as service, cutting_proxy(service.target, idle_s=IDLE_S, silently=True) as proxy:
        service.script["WaitForSampleable"] = answered_after(answer)
        with BufferClient(proxy.target, NOTICING) as client:

            def answer_the_second() -> None:
                service.wait_for("WaitForSampleable", 2)
                answer.set()

            helper = threading.Thread(target=answer_the_second)
            helper.start()
            assert client.wait_for_sampleable(request()).outcome == buffer_pb2.WAIT_OUTCOME_REACHED
            helper.join()
        assert proxy.connections >= 2


def test_h48_a_plain_stub_gets_a_clean_unavailable() -> None:
    """Users of other clients need an error that says: repeat it, nothing was consumed."""
    with fake("buffer") as service, cutting_proxy(service.target, idle_s=IDLE_S, silently=False) as proxy:
        service.script["WaitForSampleable"] = answered_after(threading.Event())
        with grpc.insecure_channel(proxy.target, [("grpc.enable_http_proxy", 0)]) as channel:
            stub = buffer_pb2_grpc.ReplayBufferStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.WaitForSampleable(request(), timeout=20))
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def sample_through(proxy: CuttingProxy, target: str, options: ClientOptions) -> list[list[str]]:
    """Sample twice through the proxy, with groups that finish only after several cuts."""
    async with AsyncBufferClient(proxy.target, options) as client, AsyncBufferClient(target) as direct:
        await direct.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id="r1"))
        groups = [buffer_pb2.GroupSpec(group_id=f"g{number}") for number in range(4)]
        await direct.calls.AddGroups(buffer_pb2.AddGroupsRequest(run_id="r1", partition="train", step=1, groups=groups))

        async def finish() -> None:
            for first in (0, 2):
                await asyncio.sleep(3 * IDLE_S)
                results = [
                    buffer_pb2.TrajectoryResult(
                        group_id=f"g{number}",
                        outputs=[buffer_pb2.Output(segments=[buffer_pb2.Segment(tokens=1, weight_version=0)])],
                    )
                    for number in (first, first + 1)
                ]
                await direct.calls.FinishTrajectories(
                    buffer_pb2.FinishTrajectoriesRequest(run_id="r1", partition="train", results=results)
                )

        finishing = asyncio.create_task(finish())
        batches = []
        for _ in range(2):
            sampled = await client.sample(
                buffer_pb2.SampleRequest(
                    run_id="r1",
                    partition="train",
                    step=1,
                    batch=2,
                    max_wait=duration(30),
                    progress_interval=duration(60),
                )
            )
            batches.append([group.group_id for group in sampled.groups])
        await finishing
        return batches


async def test_h48_a_sample_over_a_cutting_proxy_consumes_each_group_once() -> None:
    """Against the real buffer: cuts must neither lose a batch nor hand one out twice."""
    async with real_buffer() as host:
        with cutting_proxy(host.target, idle_s=IDLE_S, silently=False) as proxy:
            assert await sample_through(proxy, host.target, SILENT) == [["g0", "g1"], ["g2", "g3"]]
            assert proxy.cuts >= 2
        async with AsyncBufferClient(host.target) as direct:
            ledger = await direct.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id="r1"))
        assert (ledger.added, ledger.present.sampled, ledger.evicted) == (4, 4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("silently", [False, True], ids=["reset", "drop"])
@pytest.mark.timeout(90)
def test_h48_with_shipped_options_and_the_reported_times(silently: bool) -> None:
    """The case as it was reported: cut after 5 s without a byte, satisfied at 20 s, nothing changed in the client."""
    answer = threading.Event()
    with fake("buffer") as service, cutting_proxy(service.target, idle_s=5.0, silently=silently) as proxy:
        service.script["WaitForSampleable"] = answered_after(answer)
        timer = threading.Timer(20, answer.set)
        timer.start()
        with BufferClient(proxy.target) as client:
            assert client.wait_for_sampleable(request()).outcome == buffer_pb2.WAIT_OUTCOME_REACHED
        timer.join()
        assert proxy.connections == 1
