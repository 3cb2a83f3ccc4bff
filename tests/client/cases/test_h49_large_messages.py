"""H49: messages above 4 MiB are refused by default, in either direction."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.runtime.host import ServiceHost
from tests.client.fakes import fake
from tests.client.real import real_buffer
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, BufferClient, ClientOptions, ResourceExhausted, RetryPolicy, duration

MIB = 1024 * 1024


@pytest.fixture
async def host() -> AsyncIterator[ServiceHost]:
    async with real_buffer() as running, AsyncBufferClient(running.target) as client:
        await client.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id="r1"))
        yield running


def spec(number: int, tags: int = 0) -> buffer_pb2.GroupSpec:
    return buffer_pb2.GroupSpec(group_id=f"g{number}", tags={"padding": "x" * tags} if tags else None)


async def add(client: AsyncBufferClient, groups: list[buffer_pb2.GroupSpec]) -> None:
    await client.calls.AddGroups(buffer_pb2.AddGroupsRequest(run_id="r1", partition="train", step=1, groups=groups))


def result(number: int, payload: buffer_pb2.Payload | None = None) -> buffer_pb2.TrajectoryResult:
    output = buffer_pb2.Output(segments=[buffer_pb2.Segment(tokens=1, weight_version=0)], payload=payload)
    return buffer_pb2.TrajectoryResult(group_id=f"g{number}", outputs=[output])


async def finish(client: AsyncBufferClient, *results: buffer_pb2.TrajectoryResult) -> None:
    response = await client.calls.FinishTrajectories(
        buffer_pb2.FinishTrajectoriesRequest(run_id="r1", partition="train", results=results)
    )
    assert [outcome.reason for outcome in response.outcomes] == [""] * len(results)


async def test_h49_a_trajectory_of_5_mb_goes_and_comes(host: ServiceHost) -> None:
    """A realistic multi-modal payload must work with what the client does by itself."""
    data = bytes(range(256)) * (5 * MIB // 256)
    async with AsyncBufferClient(host.target) as client:
        await add(client, [spec(0)])
        await finish(client, result(0, await client.payload("r1", data)))
        sampled = await client.sample(
            buffer_pb2.SampleRequest(run_id="r1", partition="train", step=1, batch=1, max_wait=duration(10))
        )
        ref = sampled.groups[0].trajectories[0].outputs[0].payload.ref
        assert [item async for item in client.get_payloads("r1", [ref], lease_id=sampled.done.lease_id)] == [data]


async def test_h49_a_manifest_of_40_mb_arrives(host: ServiceHost) -> None:
    """It comes in parts; a single message of this size would be refused by every client with default limits."""
    async with AsyncBufferClient(host.target) as client:
        for number in range(20):
            await add(client, [spec(number, tags=2 * MIB)])
            await finish(client, result(number))
        sampled = await client.sample(
            buffer_pb2.SampleRequest(run_id="r1", partition="train", step=1, batch=20, max_wait=duration(30))
        )
    assert [group.group_id for group in sampled.groups] == [f"g{number}" for number in range(20)]
    assert sum(len(group.tags["padding"]) for group in sampled.groups) == 40 * MIB


async def test_h49_a_large_request_goes_out(host: ServiceHost) -> None:
    """As many long ids as one call takes are some megabytes."""
    ids = [f"unknown-group-with-a-very-long-name-{number:0450d}" for number in range(4096)]
    async with AsyncBufferClient(host.target) as client:
        response = await client.calls.EvictGroups(
            buffer_pb2.EvictGroupsRequest(run_id="r1", partition="train", group_ids=ids)
        )
    assert response.missing == len(ids)


async def test_h49_above_the_limit_is_a_clear_error_and_the_client_goes_on(host: ServiceHost) -> None:
    """RESOURCE_EXHAUSTED and not UNAVAILABLE: sending it again would never help."""
    async with AsyncBufferClient(host.target) as client:
        with pytest.raises(ResourceExhausted) as caught:
            await add(client, [spec(0, tags=65 * MIB)])
        error = caught.value
        assert (error.reason, error.metadata["cap"]) == ("MESSAGE_TOO_LARGE", "max_message_bytes")
        assert int(error.metadata["present"]) > int(error.metadata["limit"]) == 64 * MIB
        await add(client, [spec(0)])
        ledger = await client.calls.GetLedger(buffer_pb2.GetLedgerRequest(run_id="r1"))
    assert ledger.added == 1


@pytest.mark.parametrize(("over", "arrives"), [(0, True), (1, False)])
def test_h49_the_client_s_own_limit_is_exact(over: int, arrives: bool) -> None:
    """Users who lower the limit to protect a small machine rely on it."""
    answer = buffer_pb2.GetRunResponse(incarnation="x")
    while answer.ByteSize() < 1000 + over:
        answer.incarnation += "x"
    options = ClientOptions(max_message_bytes=1000, retry=RetryPolicy(max_attempts=1))
    with fake("buffer") as service, BufferClient(service.target, options) as client:
        service.script["GetRun"] = lambda request, context: answer
        request = buffer_pb2.GetRunRequest(run_id="r1")
        if arrives:
            assert client.calls.GetRun(request) == answer
        else:
            with pytest.raises(ResourceExhausted):
                client.calls.GetRun(request)
