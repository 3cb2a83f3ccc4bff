"""Deadlines, retries and request ids of the calls."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest

from tests.client.fakes import FakeService, failing, fake, free_port, in_turn, until_cancelled
from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    AsyncBufferClient,
    BufferClient,
    ClientOptions,
    EngineClient,
    InvalidArgument,
    LinkClosed,
    RetryPolicy,
    SchedulerClient,
    Timeouts,
    Unavailable,
    duration,
    seconds,
)
from turnout.client._calls import MAX_WAIT_S
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

QUICK = ClientOptions(retry=RetryPolicy(initial=0.01, maximum=0.02))
DOWN = failing(grpc.StatusCode.UNAVAILABLE, "DRAINING")


def add(**fields: Any) -> buffer_pb2.AddGroupsRequest:
    return buffer_pb2.AddGroupsRequest(run_id="r1", partition="train", step=1, **fields)


def ok(answer: Any) -> Any:
    return lambda request, context: answer


def test_unavailable_is_retried_with_one_request_id() -> None:
    """A mutation that was applied before its answer got lost must not be applied a second time."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["AddGroups"] = in_turn(DOWN, DOWN, ok(buffer_pb2.AddGroupsResponse(added=3)))
        request = add()
        assert client.calls.AddGroups(request).added == 3
        ids = [asked.request_id for asked in service.requests("AddGroups")]
        assert len(ids) == 3
        assert len(set(ids)) == 1
        assert ids[0]
        # The caller's message is the caller's: sending it again is a new mutation.
        assert request.request_id == ""
        client.calls.AddGroups(request)
        assert service.requests("AddGroups")[-1].request_id not in ids


def test_a_request_id_of_the_caller_is_kept() -> None:
    """A caller who makes ids from its own state relies on them across its own restarts."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["AddGroups"] = in_turn(DOWN, ok(buffer_pb2.AddGroupsResponse()))
        client.calls.AddGroups(add(request_id="mine"))
        assert [asked.request_id for asked in service.requests("AddGroups")] == ["mine", "mine"]


async def test_the_asyncio_client_retries_the_same_way() -> None:
    """The two clients share one implementation; this fails if they part."""
    with fake("buffer") as service:
        service.script["AddGroups"] = in_turn(DOWN, DOWN, ok(buffer_pb2.AddGroupsResponse(added=3)))
        async with AsyncBufferClient(service.target, QUICK) as client:
            assert (await client.calls.AddGroups(add())).added == 3
        assert len({asked.request_id for asked in service.requests("AddGroups")}) == 1


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
    ids=lambda code: code.name,
)
def test_nothing_but_unavailable_is_retried(code: grpc.StatusCode) -> None:
    """Retrying a refused or half-done call hides faults and makes them worse."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["AddGroups"] = failing(code)
        with pytest.raises(Exception, match=code.name):
            client.calls.AddGroups(add())
        assert len(service.requests("AddGroups")) == 1


def test_retries_end_with_the_total_and_say_why() -> None:
    """A service that is down must not hang its callers for ever, and the error must tell the cause."""
    options = ClientOptions(timeouts=Timeouts(call=0.5), retry=RetryPolicy(initial=0.05, maximum=0.1))
    with BufferClient(f"127.0.0.1:{free_port()}", options) as client:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="onnect") as caught:
            client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))
        assert time.monotonic() - began < 5
        assert not caught.value.from_service


def test_max_attempts_one_fails_at_once() -> None:
    """`turnout status` with no service running has to answer at once."""
    options = ClientOptions(retry=RetryPolicy(max_attempts=1))
    with BufferClient(f"127.0.0.1:{free_port()}", options) as client:
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))
        assert time.monotonic() - began < 5


def test_every_unary_call_has_a_deadline() -> None:
    """One call without a deadline is one trainer that hangs for a night."""
    clients: list[tuple[str, type[Any], Any]] = [
        ("buffer", BufferClient, buffer_pb2.DESCRIPTOR.services_by_name["ReplayBuffer"]),
        ("engine", EngineClient, engine_pb2.DESCRIPTOR.services_by_name["EngineController"]),
        ("scheduler", SchedulerClient, scheduler_pb2.DESCRIPTOR.services_by_name["SwitchScheduler"]),
    ]
    for name, make, descriptor in clients:
        with fake(name) as service, make(service.target) as client:
            unary = [method for method in descriptor.methods if not method.server_streaming]
            for method in unary:
                request = method.input_type._concrete_class()
                getattr(client.calls, method.name)(iter([request]) if method.client_streaming else request)
            assert service.names() == [method.name for method in unary]
            for asked in service.asked:
                assert asked.remaining is not None, asked.name
                assert asked.remaining < 610, asked.name


def test_a_long_poll_has_the_time_it_asks_for_and_less_after_a_cut() -> None:
    """A claim that is asked for again after a cut must end when the first would have, under the same request id."""
    with fake("buffer") as service, BufferClient(service.target, QUICK) as client:
        service.script["ClaimGroups"] = in_turn(DOWN, ok(buffer_pb2.ClaimGroupsResponse()))
        client.calls.ClaimGroups(buffer_pb2.ClaimGroupsRequest(run_id="r1", max_wait=duration(100)))
        first, second = service.requests("ClaimGroups")
        assert seconds(first.max_wait) == 100
        assert 90 < seconds(second.max_wait) < 100
        assert first.request_id == second.request_id != ""
        assert all(asked.remaining is not None and asked.remaining > 100 for asked in service.asked)


def test_parked_waits_and_control_calls_have_connections_of_their_own() -> None:
    """On one connection, parked waits can use up the streams that the call releasing them needs."""
    with fake("buffer") as service, BufferClient(service.target) as client:
        service.script["WatchDepth"] = lambda request, context: until_cancelled(
            context, buffer_pb2.WatchDepthResponse()
        )
        watching = client.calls.WatchDepth(buffer_pb2.WatchDepthRequest(run_id="r1"))
        next(watching)
        client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))
        client.calls.ClaimGroups(buffer_pb2.ClaimGroupsRequest(run_id="r1"))
        watching.cancel()
        peers = {asked.name: asked.peer for asked in service.asked}
        assert peers["WatchDepth"] == peers["ClaimGroups"] != peers["GetRun"]


def test_two_clients_do_not_share_a_connection() -> None:
    """gRPC pools connections by target; two trainers in one process would share fate and flow control."""
    with (
        fake("buffer") as service,
        BufferClient(service.target) as first,
        BufferClient(service.target) as second,
    ):
        first.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))
        second.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))
        assert len({asked.peer for asked in service.asked}) == 2


def test_a_closed_client_says_so() -> None:
    """A ValueError from the depths of gRPC tells nobody what happened."""
    client = BufferClient("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(LinkClosed, match=r"127\.0\.0\.1:1"):
        client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))


def test_closing_ends_a_parked_wait_of_another_thread() -> None:
    """`turnout top` is left by closing its client; the reading thread must end, and not arm its watch again."""
    with fake("buffer") as service:
        service.script["WatchDepth"] = lambda request, context: until_cancelled(context)
        client = BufferClient(service.target)
        ended: list[BaseException] = []

        def watch() -> None:
            try:
                list(client.watch_depth(buffer_pb2.WatchDepthRequest(run_id="r1")))
            except LinkClosed as error:
                ended.append(error)

        thread = threading.Thread(target=watch)
        thread.start()
        service.wait_for("WatchDepth")
        client.close()
        thread.join(10)
        assert len(ended) == 1


async def test_closing_ends_calls_of_other_tasks_with_an_error_and_no_cancellation() -> None:
    """A bare CancelledError in a task that nobody cancelled ends it without a trace."""
    with fake("buffer") as service:
        service.script["WatchDepth"] = lambda request, context: until_cancelled(context)
        service.script["ClaimGroups"] = lambda request, context: list(until_cancelled(context))
        client = AsyncBufferClient(service.target)

        async def claim() -> None:
            await client.calls.ClaimGroups(buffer_pb2.ClaimGroupsRequest(run_id="r1", max_wait=duration(60)))

        async def watch() -> None:
            async for _ in client.watch_depth(buffer_pb2.WatchDepthRequest(run_id="r1")):
                pass

        tasks = [asyncio.create_task(claim()), asyncio.create_task(watch())]
        await asyncio.to_thread(service.wait_for, "ClaimGroups")
        await asyncio.to_thread(service.wait_for, "WatchDepth")
        await client.close()
        for task in tasks:
            with pytest.raises(LinkClosed):
                await task


def test_an_asyncio_client_refuses_a_second_event_loop() -> None:
    """grpc.aio shares one poller between loops and then misses wake-ups: an error at once beats a hang later."""
    with fake("buffer") as service:
        client = AsyncBufferClient(service.target)

        async def call() -> None:
            await client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))

        with asyncio.Runner() as first:
            first.run(call())
            with asyncio.Runner() as second, pytest.raises(RuntimeError, match="another event loop"):
                second.run(call())
            first.run(client.close())


def test_cancelling_a_task_cancels_the_call_at_the_service() -> None:
    """An abandoned call that lives on holds a claim or a slot that nobody knows of."""
    gone = threading.Event()

    def park(request: Any, context: Any) -> Any:
        context.add_callback(gone.set)
        gone.wait(10)
        return buffer_pb2.ClaimGroupsResponse()

    async def cancelled(service: FakeService) -> None:
        async with AsyncBufferClient(service.target) as client:
            call = asyncio.ensure_future(
                client.calls.ClaimGroups(buffer_pb2.ClaimGroupsRequest(run_id="r1", max_wait=duration(60)))
            )
            await asyncio.to_thread(service.wait_for, "ClaimGroups")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(gone.wait, 10)

    with fake("buffer") as service:
        service.script["ClaimGroups"] = park
        asyncio.run(cancelled(service))


@pytest.mark.parametrize("value", [0.0, 1e-9, 0.1, 3.75, 12_345.678, MAX_WAIT_S])
def test_durations_keep_their_value(value: float) -> None:
    """A wait that is a nanosecond negative, or overflows, is refused by the service."""
    assert seconds(duration(value)) == pytest.approx(value, abs=1e-9)


def test_durations_are_cut_to_what_services_take() -> None:
    """1e18 seconds must be a long wait, not an OverflowError."""
    assert seconds(duration(1e18)) == MAX_WAIT_S
    assert seconds(duration(-5.0)) == 0


@pytest.mark.parametrize("number", [2**31, 2**53 + 1, 2**63 - 1, -1])
def test_sixty_four_bit_numbers_arrive_exactly(number: int) -> None:
    """A step or version that goes through a float on the way loses its last digits."""
    with fake("scheduler") as service, SchedulerClient(service.target) as client:
        service.script["GetRun"] = lambda request, context: scheduler_pb2.GetRunResponse(
            run=scheduler_pb2.Run(step=number, epoch=number)
        )
        run = client.calls.GetRun(scheduler_pb2.GetRunRequest(run_id="r1")).run
        client.calls.EndStep(scheduler_pb2.EndStepRequest(run_id="r1", epoch=number, step=number))
        assert (run.step, run.epoch) == (number, number)
        assert service.requests("EndStep")[0].step == number


def test_bad_values_of_one_call_do_not_harm_the_next() -> None:
    """A client that is broken after one refused request has to be remade by every caller."""
    with fake("buffer") as service, BufferClient(service.target) as client:
        service.script["GetRun"] = in_turn(failing(grpc.StatusCode.INVALID_ARGUMENT), ok(buffer_pb2.GetRunResponse()))
        with pytest.raises(InvalidArgument):
            client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="\x00"))
        client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="r1"))
