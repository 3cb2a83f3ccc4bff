"""Caps of a run, as callers meet them."""

from __future__ import annotations

import asyncio

import pytest

from services.runtime.clock import ManualClock
from services.runtime.errors import Code, TurnoutError
from tests.buffer.helpers import Buffer, Caller, output, refused, refused_stream, result
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import AsyncBufferClient, ResourceExhausted


def told(error: TurnoutError) -> tuple[str, str, str, str]:
    assert error.code is Code.RESOURCE_EXHAUSTED
    return error.reason, error.metadata["cap"], error.metadata["limit"], error.metadata["present"]


async def test_every_refusal_names_the_cap_its_limit_and_what_is_there(buffer: Buffer) -> None:
    """Whoever is refused at night must see which number to raise, and how far off it is."""
    caller = buffer.caller()
    await caller.create(caps=pb.Caps(max_groups=3, max_bytes=1000, max_parked_waits=2))
    await caller.add("a", "b", prompt=b"x" * 300)
    assert told(await refused(caller.add("c", "d"))) == ("CAP_GROUPS", "max_groups", "3", "2")
    assert told(await refused(caller.add("c", prompt=b"x" * 401))) == ("CAP_BYTES", "max_bytes", "1000", "600")
    parked = [asyncio.create_task(caller.wait(3, max_wait=5)) for _ in range(2)]
    await buffer.until_parked(2)
    refusal = ("CAP_PARKED_WAITS", "max_parked_waits", "2", "2")
    assert told(await refused_stream(caller.wait_call(1, max_wait=5))) == refusal
    # The calls that free something are not bounded by any of it.
    await caller.evict("a", "b")
    await caller.finish_new("c", "d", "e")
    await asyncio.gather(*parked)


@pytest.fixture
async def limited(timed: Buffer) -> Caller:
    """A run that may ask twice a second, on a clock that stands still."""
    caller = timed.caller()
    await caller.create(caps=pb.Caps(max_request_rate=2.0), max_attempts=9)
    await caller.open()
    return caller


async def test_the_request_rate_is_capped_and_says_when_to_come_back(limited: Caller, clock: ManualClock) -> None:
    """One reader in a hot loop must not take the service from all others."""
    await limited.depth()
    await limited.depth()
    error = await refused(limited.depth())
    assert told(error) == ("CAP_REQUEST_RATE", "max_request_rate", "2.0", "3")
    assert error.retry_after == 0.5
    for call in (limited.groups(), limited.group("g"), limited.ledger(), limited.add("g"), limited.claim()):
        assert (await refused(call)).reason == "CAP_REQUEST_RATE"
    for stream in (limited.wait_call(1), limited.sample_call(1)):
        assert (await refused_stream(stream)).reason == "CAP_REQUEST_RATE"
    assert (await refused(limited.stub.ReportProgress(pb.ReportProgressRequest(**limited.place)))).retry_after
    await clock.advance(0.5)
    await limited.depth()
    assert (await refused(limited.depth())).reason == "CAP_REQUEST_RATE"


async def test_what_settles_renews_frees_or_pays_is_never_refused_for_the_rate(
    limited: Caller, clock: ManualClock
) -> None:
    """A cap that stops a commit keeps the run full and makes everything worse."""
    await limited.add("a", "b", "c", size=1)
    claims = await limited.claim(3)
    assert (await refused(limited.depth())).reason == "CAP_REQUEST_RATE"
    tokens = [claim.token for claim in claims]
    for _ in range(20):
        renewed = await limited.stub.RenewClaims(pb.RenewClaimsRequest(run_id="run", tokens=tokens))
        assert {outcome.code for outcome in renewed.outcomes} == {0}
    await limited.finish_claim(claims[0])
    await limited.finish_claim(claims[1])
    await limited.fail(claims[2])
    await clock.advance(1.0)
    sample = await limited.sample(1)
    other = await limited.sample(1)
    assert (await refused(limited.depth())).reason == "CAP_REQUEST_RATE"
    lease = {"run_id": "run", "epoch": limited.epoch, "lease_id": sample.done.lease_id}
    await limited.stub.RenewSample(pb.RenewSampleRequest(**lease))
    await limited.stub.RenewEpoch(pb.RenewEpochRequest(run_id="run", epoch=1))
    await limited.commit(sample.done.lease_id)
    await limited.stub.ReleasePayload(pb.ReleasePayloadRequest(**lease))
    await limited.stub.ReleaseSample(pb.ReleaseSampleRequest(**lease | {"lease_id": other.done.lease_id}))
    assert (await limited.evict("b")).evicted == 1
    await limited.stub.FailGroup(pb.FailGroupRequest(**limited.place, group_id="c"))
    assert (await refused(limited.depth())).reason == "CAP_REQUEST_RATE"


async def test_one_run_at_its_rate_leaves_another_alone_and_the_cap_can_be_raised(timed: Buffer) -> None:
    one, other = timed.caller("one"), timed.caller("other")
    for caller in (one, other):
        await caller.create(caps=pb.Caps(max_request_rate=1.0))
    await one.depth()
    assert (await refused(one.depth())).reason == "CAP_REQUEST_RATE"
    await other.depth()
    config = (await one.stub.GetRun(pb.GetRunRequest(run_id="one"))).run.config
    assert config.caps.max_request_rate == 1.0
    config.caps.ClearField("max_request_rate")
    await one.stub.UpdateRun(pb.UpdateRunRequest(run_id="one", config=config))
    for _ in range(10):
        await one.depth()


async def test_the_client_comes_back_when_it_is_told_to(buffer: Buffer) -> None:
    """A client that gives up at a cap of requests would fail a run for a busy second."""
    caller = buffer.caller()
    await caller.create(caps=pb.Caps(max_request_rate=20.0, max_groups=1))
    async with AsyncBufferClient(buffer.host.target) as client:
        read = pb.GetSampleableCountRequest(**caller.place)
        async with asyncio.timeout(20):
            for _ in range(30):
                await client.calls.GetSampleableCount(read)
        # What time alone does not help is not repeated.
        groups = [pb.GroupSpec(group_id=name) for name in "ab"]
        with pytest.raises(ResourceExhausted) as caught:
            await client.calls.AddGroups(pb.AddGroupsRequest(**caller.place, step=0, groups=groups))
        assert caught.value.retry_after is None
    await caller.finish(result("x", 0, output()))
