"""Every call of the three services against the table of who may make it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.runtime.host import ServiceHost
from services.runtime.permissions import PERMISSIONS, Role
from tests.security.houses import DESCRIPTORS, Call, Tokens, calls, house
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, ClientOptions, PermissionDenied, RunNotFound, Security, Unauthenticated

SERVICES = sorted(DESCRIPTORS)
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNKNOWN_CALLER = grpc.StatusCode.UNAUTHENTICATED
_CHANNELZ = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    made = Tokens(tmp_path / "tokens.yaml")
    made.write()
    return made


def _about(call: Call, run: str) -> bytes:
    """A request that names a run, where one can."""
    request: Message = call.request()
    fields = request.DESCRIPTOR.fields_by_name
    if "run_id" in fields:
        request.run_id = run  # type: ignore[attr-defined]
    elif "header" in fields:
        request.header.run_id = run  # type: ignore[attr-defined]
    return request.SerializeToString()


async def _create(host: ServiceHost, tokens: Tokens) -> None:
    trainer = ClientOptions(security=Security(token=tokens.of(Role.TRAINER)))
    async with AsyncBufferClient(host.target, trainer) as client:
        config = buffer_pb2.RunConfig(partitions=[buffer_pb2.PartitionConfig(name="train")])
        await client.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id="mine", config=config))


def test_the_table_has_every_call_and_no_other() -> None:
    """A call that was added to the contract and not to the table is nobody's; one that is gone is a wrong page."""
    contract: list[Any] = [*DESCRIPTORS.values(), _CHANNELZ, _REFLECTION]
    assert set(PERMISSIONS) == {f"/{service.full_name}/{call.name}" for service in contract for call in service.methods}


def test_readers_can_change_nothing() -> None:
    """What a dashboard may do is given away easily."""
    reading = {path.rpartition("/")[2] for path, roles in PERMISSIONS.items() if Role.READER in roles}
    assert [name for name in reading if not name.startswith(("Get", "List", "Watch"))] == []
    assert "GetPayloads" not in reading


def test_an_operator_may_do_everything() -> None:
    """Who is woken at night must not first look for another token."""
    assert [path for path, roles in PERMISSIONS.items() if Role.OPERATOR not in roles] == []


@pytest.mark.parametrize("service", SERVICES)
async def test_each_role_is_let_in_where_the_table_says_so(service: str, tokens: Tokens) -> None:
    """A table that nothing enforces protects nothing: every call, by every role, over the wire."""
    wrong = []
    async with house(service, tokens_file=tokens.path) as (_, line):
        for call in calls(service):
            for role in Role:
                code, details = await call.code(line, _about(call, "mine"), tokens.all(role), timeout=2)
                refused = code is DENIED and " is for " in details
                if refused == (role in PERMISSIONS[call.path]):
                    wrong.append((call.path, role, code, details))
    assert wrong == []


@pytest.mark.parametrize("service", SERVICES)
async def test_a_token_of_one_run_opens_no_other(service: str, tokens: Tokens) -> None:
    """Two teams on one buffer must not read or empty each other's; nor learn which runs there are."""
    wrong = []
    async with house(service, tokens_file=tokens.path) as (_, line):
        for call in calls(service):
            for run in ("theirs", "", "mine2", "MINE"):
                code, details = await call.code(line, _about(call, run), tokens.of(Role.OPERATOR), timeout=2)
                if code is not DENIED:
                    wrong.append((call.path, run, code, details))
            if not call.path.endswith("/ListRuns"):
                code, details = await call.code(line, _about(call, "mine"), tokens.of(Role.OPERATOR), timeout=2)
                if code in (DENIED, UNKNOWN_CALLER):
                    wrong.append((call.path, "mine", code, details))
    assert wrong == []


@pytest.mark.parametrize("service", SERVICES)
async def test_nobody_gets_in_without_a_token_in_force(service: str, tokens: Tokens) -> None:
    """One call that was forgotten is the way in."""
    good = tokens.all(Role.OPERATOR)
    wrong = []
    async with house(service, tokens_file=tokens.path) as (_, line):
        for call in calls(service):
            for token in (None, "", good[:-1], good + "a", "turnout.nobody.x"):
                for raw in (_about(call, "mine"), b"\xff" * 20):
                    code, details = await call.code(line, raw, token, timeout=2)
                    if code is not UNKNOWN_CALLER or (token and token in details):
                        wrong.append((call.path, token, code, details))
    assert wrong == []


async def test_health_is_open_and_what_shows_the_inside_is_the_operators(tokens: Tokens) -> None:
    """A probe of the orchestrator has no token; a list of all connections is a map for an attacker."""
    async with house("buffer", tokens_file=tokens.path) as (_, line):
        health: Any = health_pb2_grpc.HealthStub(cast(Any, line.aio))
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        for role, allowed in ((None, False), (Role.TRAINER, False), (Role.OPERATOR, True)):
            metadata = None if role is None else (("authorization", f"Bearer {tokens.all(role)}"),)
            servers = channelz_pb2_grpc.ChannelzStub(cast(Any, line.aio)).GetServers(
                channelz_pb2.GetServersRequest(), metadata=metadata
            )
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, line.aio))
            listing = reflection.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
            )
            if allowed:
                assert (await servers).server
                assert [len(answer.list_services_response.service) async for answer in listing] == [4]
            else:
                expected = UNKNOWN_CALLER if role is None else DENIED
                for call in (servers, listing):
                    assert await call.code() is expected


async def test_a_later_message_of_a_stream_cannot_change_the_run(tokens: Tokens) -> None:
    """A check of the first message alone is passed with one's own run, and then the other one is named."""
    call = next(call for call in calls("buffer") if call.path.endswith("/FinishStream"))
    async with house("buffer", tokens_file=tokens.path) as (host, line):
        await _create(host, tokens)
        headers = [buffer_pb2.FinishStreamHeader(run_id=run, partition="train") for run in ("mine", "theirs")]
        messages = [buffer_pb2.FinishStreamRequest(header=header).SerializeToString() for header in headers]
        code, details = await call.code(line, messages, tokens.of(Role.WORKER))
        assert (code, "alone" in details) == (DENIED, True)


async def test_the_client_tells_the_refusals_apart(tokens: Tokens, tmp_path: Path) -> None:
    """A worker with the wrong token should stop, one whose run is not there yet should wait."""
    held = tmp_path / "worker.token"
    held.write_text(tokens.of(Role.WORKER) + "\n")
    async with house("buffer", tokens_file=tokens.path) as (host, _):
        async with AsyncBufferClient(host.target, ClientOptions(security=Security(token_file=held))) as client:
            with pytest.raises(RunNotFound):
                await client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="mine"))
            with pytest.raises(PermissionDenied) as caught:
                await client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="theirs"))
            assert caught.value.reason == "RUN_NOT_ALLOWED"
            with pytest.raises(PermissionDenied) as caught:
                await client.calls.DeleteRun(buffer_pb2.DeleteRunRequest(run_id="mine"))
            assert (caught.value.reason, caught.value.metadata["role"]) == ("ROLE_NOT_ALLOWED", "worker")
            # A renewed token counts at once.
            held.write_text(tokens.of(Role.TRAINER))
            with pytest.raises(RunNotFound):
                await client.calls.DeleteRun(buffer_pb2.DeleteRunRequest(run_id="mine"))
        async with AsyncBufferClient(host.target) as client:
            with pytest.raises(Unauthenticated) as unknown:
                await client.calls.GetRun(buffer_pb2.GetRunRequest(run_id="mine"))
            assert unknown.value.reason == "TOKEN_MISSING"


async def test_a_token_that_leaves_the_file_ends_the_calls_it_holds_open(tokens: Tokens) -> None:
    """A watch of a revoked token would go on reading for as long as the run lasts."""
    watch = next(call for call in calls("buffer") if call.path.endswith("/WatchDepth"))
    request = buffer_pb2.WatchDepthRequest(run_id="mine", partition="train").SerializeToString()
    async with house("buffer", tokens_file=tokens.path) as (host, line):
        await _create(host, tokens)
        streams = []
        for role in (Role.READER, Role.OPERATOR):
            stream = watch.bound(line.aio)(request, metadata=(("authorization", f"Bearer {tokens.of(role)}"),))
            assert await stream.read() is not grpc.aio.EOF
            streams.append(stream)
        tokens.write(without=frozenset({Role.READER}))
        assert await asyncio.wait_for(streams[0].code(), 30) is UNKNOWN_CALLER
        assert not streams[1].done()
        code, _ = await watch.code(line, request, tokens.of(Role.READER))
        assert code is UNKNOWN_CALLER
