"""What one caller can use up, and what it is told."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from services.runtime.config import ServiceSettings
from services.runtime.errors import Code, TurnoutError
from services.runtime.guard import Caller, TokenLimits
from services.runtime.permissions import Role
from services.runtime.tokens import Token
from tests.runtime.helpers import Caller as ProbeCaller
from tests.runtime.helpers import probe_host
from tests.security.houses import Tokens, house
from turnout.buffer.v1 import buffer_pb2
from turnout.client import (
    AsyncBufferClient,
    ClientOptions,
    ResourceExhausted,
    RetryPolicy,
    RunNotFound,
    Security,
)
from turnout.client import (
    TurnoutError as ClientError,
)

_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


async def test_the_rate_of_a_token_is_held_over_time() -> None:
    """A loop gone wild in one worker must not take the buffer's only core from all others."""
    caller = Caller(Token("w", Role.WORKER, None, b""), TokenLimits(10, 1000), 0.0)
    task = asyncio.current_task()
    assert task is not None

    def begun(now: float, wanted: int) -> int:
        for number in range(wanted):
            try:
                caller.enter(task, now)
            except TurnoutError:
                return number
            caller.leave(task)
        return wanted

    assert begun(0.0, 100) == 10
    assert begun(0.05, 100) == 0
    assert begun(0.5, 100) == 5
    assert begun(1000.0, 100) == 10
    with pytest.raises(TurnoutError) as caught:
        caller.enter(task, 1000.0)
    assert (caught.value.code, caught.value.reason) == (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert caught.value.metadata == {"cap": "token_calls_per_s", "limit": "10", "token": "w"}
    assert caught.value.retry_after == pytest.approx(0.1)


async def test_a_client_waits_out_the_limit_it_is_told_of(tmp_path: Path) -> None:
    """A burst that is a little too large must become a little slower, not an error in a training step."""
    tokens = Tokens(tmp_path / "tokens.yaml")
    security = Security(token=tokens.of(Role.READER))
    request = buffer_pb2.GetRunRequest(run_id="mine")
    async with house("buffer", tokens_file=tokens.write(), token_calls_per_s=2) as (host, _):
        once = ClientOptions(security=security, retry=RetryPolicy(max_attempts=1))
        async with AsyncBufferClient(host.target, once) as client:
            reasons = set()
            for _ in range(20):
                try:
                    await client.calls.GetRun(request)
                except ClientError as error:
                    reasons.add((type(error), error.reason))
            assert reasons == {(RunNotFound, "RUN_NOT_FOUND"), (ResourceExhausted, "RATE_LIMITED")}
        async with AsyncBufferClient(host.target, ClientOptions(security=security)) as client:
            for _ in range(4):
                with pytest.raises(RunNotFound):
                    await client.calls.GetRun(request)


async def test_calls_that_a_token_holds_open_are_counted_until_they_end(tmp_path: Path) -> None:
    """Watches that are opened again and again and never closed fill the memory of the service."""
    tokens = Tokens(tmp_path / "tokens.yaml")
    trainer = ClientOptions(security=Security(token=tokens.of(Role.TRAINER)))
    async with (
        house("buffer", tokens_file=tokens.write(), token_calls_at_work=3) as (host, _),
        AsyncBufferClient(host.target, trainer) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        config = buffer_pb2.RunConfig(partitions=[buffer_pb2.PartitionConfig(name="train")])
        await client.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id="mine", config=config))
        watches = []
        for _ in range(3):
            watch = client.calls.WatchDepth(buffer_pb2.WatchDepthRequest(run_id="mine", partition="train"))
            stack.callback(watch.cancel)
            await anext(aiter(watch))
            watches.append(watch)
        with pytest.raises(ResourceExhausted) as caught:
            await client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="mine"))
        assert caught.value.reason == "TOO_MANY_CALLS"
        assert caught.value.metadata["limit"] == "3"
        watches[0].cancel()
        while True:
            # The service hears of the end a moment later.
            with contextlib.suppress(ResourceExhausted):
                await client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="mine"))
                break


async def test_connections_beyond_the_limit_are_closed_and_those_before_go_on() -> None:
    """Sockets are finite; the trainer that is connected must not suffer from those who open more of them."""
    async with (
        probe_host(settings=ServiceSettings(max_connections=3, grace_s=1)) as host,
        contextlib.AsyncExitStack() as stack,
    ):
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(host.target, options=_OWN_CONNECTION))
            for _ in range(6)
        ]
        codes = []
        for channel in channels:
            try:
                await ProbeCaller(channel).unary("x")
                codes.append(grpc.StatusCode.OK)
            except grpc.aio.AioRpcError as error:
                codes.append(error.code())
        assert codes == [grpc.StatusCode.OK] * 3 + [grpc.StatusCode.UNAVAILABLE] * 3
        assert (await ProbeCaller(channels[0]).unary("y")).value == "y"


async def test_a_message_above_the_limit_is_refused_with_both_sizes() -> None:
    """An accidental gigabyte must not be read into memory first."""
    settings = ServiceSettings(max_message_bytes=1 << 16, grace_s=1)
    async with probe_host(settings=settings) as host, grpc.aio.insecure_channel(host.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ProbeCaller(channel).unary("x" * (1 << 17))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(1 << 16) in (caught.value.details() or "")
        assert (await ProbeCaller(channel).unary("y")).value == "y"


async def test_headers_above_the_limit_of_grpc_are_refused() -> None:
    """Metadata is held before anybody knows who sends it."""
    async with probe_host() as host, grpc.aio.insecure_channel(host.target) as channel:
        call: Any = channel.unary_unary("/turnout.test.v1.Probe/Unary")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", metadata=(("authorization", "Bearer " + "x" * (1 << 17)),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await ProbeCaller(channel).unary("y")).value == "y"
