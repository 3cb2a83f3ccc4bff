"""A controller that dies anywhere, and what the next one makes of what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest

from services.engine.domain.spec import Weights
from services.runtime.statuses import from_rpc_error
from tests.engine.helpers import (
    RUN,
    Engine,
    generate,
    replicas,
    role,
    until,
    update,
)
from tests.engine.lives import Engines, Points, write_down
from tests.engine.rounds import HYBRID, REGISTERED, STANDALONE, Doubter, Trainer
from turnout.engine.v1 import engine_pb2 as pb


async def check(engine: Engine, engines: Engines) -> None:
    """What must hold at every moment: who serves has everything, and no operation is left hanging."""
    for replica_id, replica in (await replicas(engine)).items():
        state = await engines.by_id[replica_id].probe()
        if replica.route == pb.ROUTE_STATE_SERVING:
            assert state.resident_tags == state.declared_tags, f"{replica_id} serves with memory asleep"
            assert (state.weights, state.paused) == (Weights.INTACT, False), replica_id
            assert state.weight_version == replica.weight_version
        if replica.weights == pb.WEIGHTS_STATE_INTACT and not replica.update_id:
            assert state.weights is Weights.INTACT, f"{replica_id} is believed to have weights"
        if replica.confirmed_free:
            assert not state.resident_tags, f"{replica_id} is called free"


async def ended(engine: Engine) -> bool:
    """Whether no operation is under way."""
    answer = await engine.stub.ListOperations(pb.ListOperationsRequest(run_id=RUN))
    return all(operation.state != pb.OPERATION_STATE_RUNNING for operation in answer.operations)


async def dies_at(
    engines: Engines, directory: Path, copy: Path, points: Points, make: Callable[[Engine], Trainer]
) -> Trainer | None:
    """A round up to the point; None if the round ended before it."""
    async with engines.controlled(directory, points) as engine:
        trainer = make(engine)
        going = asyncio.ensure_future(trainer.go())
        reached = asyncio.ensure_future(points.reached.wait())
        await asyncio.wait({going, reached}, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if going.done():
            going.result()
            return None
        stored = list(engines.disk.stored)
        # Those that the first controller told of are known to the second.
        known = [operation.operation_id for operation in engine.controller.operations.all if operation.duration]
    await asyncio.wait({going})
    assert going.cancelled() or isinstance(going.exception(), grpc.aio.AioRpcError)
    await write_down(stored, copy)
    trainer.known = known
    return trainer


async def undone(engine: Engine, trainer: Trainer) -> None:
    """Give everything up instead of going on, then update all that serve."""
    if trainer.at < REGISTERED:
        await trainer.go()
        return
    epoch = 1
    if trainer.steps[trainer.at] in (trainer.begin_standalone, trainer.begin_hybrid):
        # It may be open, and its id never came: a trainer that starts anew ends it.
        epoch = 2
        await engine.stub.OpenEpoch(pb.OpenEpochRequest(run_id=RUN, epoch=epoch))
    elif trainer.begun.update_id:
        abort = pb.AbortWeightUpdateRequest(run_id=RUN, epoch=epoch, update_id=trainer.begun.update_id)
        await allowing("UPDATE_CLOSED", engine.stub.AbortWeightUpdate(abort))
    abort_lend = pb.AbortLendRequest(run_id=RUN, epoch=epoch, lend_id="lend")
    begun = any(replica.lend_id for replica in (await replicas(engine)).values())
    if await allowing("LEND_CLOSED", engine.stub.AbortLend(abort_lend)) and begun:
        now = await replicas(engine)
        assert all(now[hybrid].confirmed_free for hybrid in HYBRID)
    await engine.stub.Reclaim(pb.ReclaimRequest(run_id=RUN, epoch=epoch))
    await update(engine, role("standalone"), 2, epoch=epoch)
    now = await replicas(engine)
    assert [now[s].route for s in STANDALONE] == [pb.ROUTE_STATE_SERVING] * 2


async def allowing(reasons: str, call: Awaitable[object]) -> bool:
    """Whether a call succeeded; it may be refused for these reasons alone."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if from_rpc_error(error).reason not in reasons.split():
            raise
        return False
    return True


async def round_with_a_death(tmp_path: Path, at: int, *, ending: str, mute: bool) -> bool:
    """One round in which the controller dies; returns whether there was such a point."""
    engines, points = Engines(mute), Points(at)
    make = Doubter if ending == "aborted" else Trainer
    trainer = await dies_at(engines, tmp_path / f"first{at}", tmp_path / f"second{at}", points, make)
    if trainer is None:
        return False
    where = f"point {at}, {points.names[-1]}, in step {trainer.at}"
    try:
        async with asyncio.timeout(20), engines.controlled(tmp_path / f"second{at}") as engine:
            if trainer.at:
                # Otherwise the controller may not even know its run.
                await check(engine, engines)
                for operation_id in trainer.known:
                    await engine.stub.GetOperation(pb.GetOperationRequest(run_id=RUN, operation_id=operation_id))
                await until(lambda: ended(engine))
                await check(engine, engines)
            trainer.engine = engine
            if ending == "undone":
                await undone(engine, trainer)
            else:
                await trainer.go()
            await check(engine, engines)
            now = await replicas(engine)
            assert all(now[hybrid].confirmed_free for hybrid in HYBRID if hybrid in now)
            if ending != "undone":
                assert [now[s].route for s in STANDALONE] == [pb.ROUTE_STATE_SERVING] * 2
                assert [now[s].weight_version for s in STANDALONE] == [1, 1]
                output = await generate(engine, "after", max_tokens=3)
                assert len(output.tokens) == 3
    except (AssertionError, grpc.aio.AioRpcError, TimeoutError) as error:
        raise AssertionError(f"{where}: {error}") from error
    return True


ENDINGS = pytest.mark.parametrize("ending", ["repeated", "undone", "aborted"])
ENGINES = pytest.mark.parametrize("mute", [False, True], ids=["telling", "mute"])


@ENDINGS
@ENGINES
async def test_a_controller_may_die_at_some_moments_of_a_round(tmp_path: Path, mute: bool, ending: str) -> None:
    """A sample of the moments below, one in 40."""
    for at in range(13 + 2 * len(ending) + 11 * mute, 220, 40):
        assert await round_with_a_death(tmp_path, at, ending=ending, mute=mute)


@pytest.mark.slow
@pytest.mark.timeout(900)
@ENDINGS
@ENGINES
async def test_a_controller_may_die_at_every_moment_of_a_round(tmp_path: Path, mute: bool, ending: str) -> None:
    """Whatever it was in the middle of, the repeated call completes it, and nothing serves that must not."""
    at = 1
    while await round_with_a_death(tmp_path, at, ending=ending, mute=mute):
        at += 1
    assert at > 200
