"""Where requests go on while GPUs are lent, as the policy that lends wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from tests.engine.helpers import RUN, Engine, Output, generate, reclaim, role, until, update
from tests.engine.recorder import in_engines, recorded
from turnout.engine.v1 import engine_pb2 as pb


def keys(*trajectories: int, attempt: int = 0) -> list[pb.JoinKey]:
    """Members of one group."""
    return [pb.JoinKey(partition="train", group_id="g", trajectory=t, attempt=attempt) for t in trajectories]


@asynccontextmanager
async def running(engine: Engine, count: int) -> AsyncIterator[list[asyncio.Task[Output]]]:
    """So many members of the group, on the way, each in a session of its own."""
    tasks = [
        asyncio.create_task(
            generate(engine, f"r{t}", (t,), max_tokens=100_000, join_key=keys(t, attempt=1)[0], session_id=f"s{t}")
        )
        for t in range(count)
    ]
    try:
        await until(lambda: in_engines(engine) == count)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def where(engine: Engine, replica_ids: Iterable[str]) -> set[int]:
    """Trajectories that these replicas' engines have."""
    forwards = [forward for replica_id in replica_ids for forward in engine.controller.fleet.get(replica_id).forwards]
    return {key.trajectory for forward in forwards if (key := forward.generation.join_key) is not None}  # type: ignore[attr-defined]


async def lend(engine: Engine, lend_id: str, hybrid: list[pb.JoinKey], standalone: list[pb.JoinKey]) -> None:
    """A lend within a step: standalone replicas go on undisturbed."""
    placement = pb.Placement(hybrid=hybrid, standalone=standalone)
    await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id=lend_id, placement=placement))
    await update(engine, role("hybrid"), 1, "ASLEEP")
    await engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, lend_id=lend_id, weight_version=1))


FLEET = ("h0:hybrid", "h1:hybrid", "s0:standalone")


async def test_running_requests_move_to_the_lent_replicas_and_lose_nothing() -> None:
    """Lent GPUs idle while the standalone replicas are full: nothing moves by itself within a step."""
    async with recorded(*FLEET, scale=1.0) as (engine, _), running(engine, 6) as tasks:
        assert where(engine, ["s0"]) == set(range(6))
        # Some tokens each, at about 100 a second.
        await asyncio.sleep(0.5)
        await lend(engine, "l", keys(0, 1, 2, 3), keys(4, 5))
        await until(lambda: in_engines(engine) == 6)
        await until(lambda: where(engine, ["h0", "h1"]) == {0, 1, 2, 3})
        assert [len(where(engine, [name])) for name in ("h0", "h1")] == [2, 2]
        assert where(engine, ["s0"]) == {4, 5}
        await asyncio.sleep(0.5)
        await engine.stub.Abort(pb.AbortRequest(run_id=RUN, request_ids=["r0", "r4"]))
        moved, stayed = await tasks[0], await tasks[4]
        assert moved.segments[0].replica_id == "s0"
        assert moved.segments[-1].replica_id in ("h0", "h1")
        assert sum(segment.tokens for segment in moved.segments) == len(moved.tokens)
        assert [segment.replica_id for segment in stayed.segments] == ["s0"]


async def test_long_prefixes_stay_when_a_weight_update_interrupts_everything() -> None:
    """Placed by load alone after a step's end, the longest prefixes were prefilled again on lent GPUs, then once more
    after the reclaim."""
    async with recorded(*FLEET, scale=1.0) as (engine, _), running(engine, 6):
        placement = pb.Placement(hybrid=keys(5), standalone=keys(0, 1, 2, 3))
        await engine.stub.BeginLend(pb.BeginLendRequest(run_id=RUN, lend_id="l", placement=placement))
        await update(engine, role("standalone"), 1, "AWAKE")
        await update(engine, role("hybrid"), 1, "ASLEEP")
        await engine.stub.FinishLend(pb.FinishLendRequest(run_id=RUN, lend_id="l", weight_version=1))
        await until(lambda: in_engines(engine) == 6)
        # The one that nobody placed went to the least loaded.
        assert where(engine, ["s0"]) == {0, 1, 2, 3}
        assert where(engine, ["h0", "h1"]) == {4, 5}


async def test_wishes_end_with_their_lend() -> None:
    """Requests would pile up on what little is left, or wait for replicas that are gone."""
    async with recorded(*FLEET, scale=1.0) as (engine, _), running(engine, 4):
        await lend(engine, "l", keys(0, 1, 2, 3), [])
        await until(lambda: where(engine, ["h0", "h1"]) == {0, 1, 2, 3})
        await reclaim(engine)
        await until(lambda: where(engine, ["s0"]) == {0, 1, 2, 3})
        await lend(engine, "m", [], [])
        assert where(engine, ["s0"]) == {0, 1, 2, 3}
        assert engine.controller.fleet.wishes.role(None) is None


async def test_a_request_whose_pool_takes_none_goes_elsewhere() -> None:
    """A wish must never keep a request waiting."""
    async with recorded("h0:hybrid", "s0:standalone", scale=1.0) as (engine, _), running(engine, 2):
        await lend(engine, "l", [], keys(0, 1))
        await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="s0"))
        await until(lambda: where(engine, ["h0"]) == {0, 1})
