"""Watching replicas: what is told, and that watchers do not slow commands down."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.engine.servicers import fleet
from services.engine.wire.replicas import write_replica
from tests.engine.helpers import RUN, Engine, register, running, until
from turnout.engine.v1 import engine_pb2 as pb


def watch(engine: Engine, told: list[pb.WatchReplicasResponse]) -> asyncio.Task[None]:
    async def run() -> None:
        async for message in engine.stub.WatchReplicas(pb.WatchReplicasRequest(run_id=RUN)):
            told.append(message)  # noqa: PERF401 - one by one, as they come

    return asyncio.create_task(run())


async def test_a_command_on_one_replica_is_written_out_for_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a command had every watcher write out the whole fleet: with 64 replicas that cost the command more
    time than its engine took."""
    written: list[str] = []

    def counted(slot: Any, running: int, parked: int) -> pb.Replica:
        written.append(slot.replica_id)
        return write_replica(slot, running, parked)

    monkeypatch.setattr(fleet, "write_replica", counted)
    told: list[pb.WatchReplicasResponse] = []
    async with running(probe_interval=3600) as engine:
        for number in range(8):
            await register(engine, f"h{number}")
        watching = watch(engine, told)
        await until(lambda: bool(told))
        assert len(told[0].changed) == 8
        written.clear()
        await engine.stub.Pause(pb.PauseRequest(run_id=RUN, selector=pb.ReplicaSelector(replica_ids=["h3"])))
        await until(lambda: any(one.paused for message in told[1:] for one in message.changed))
        assert set(written) == {"h3"}
        assert {one.spec.replica_id for message in told[1:] for one in message.changed} == {"h3"}
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_replica_that_is_registered_anew_is_told_again() -> None:
    """Same id and same state as before it left: a watcher has dropped it meanwhile, and must get it back."""
    told: list[pb.WatchReplicasResponse] = []
    async with running(probe_interval=3600) as engine:
        await register(engine, "h0")
        watching = watch(engine, told)
        await until(lambda: bool(told))
        await engine.stub.Deregister(pb.DeregisterRequest(run_id=RUN, replica_id="h0"))
        await until(lambda: any(list(message.removed) == ["h0"] for message in told))
        before = len(told)
        await register(engine, "h0")
        await until(lambda: any(message.changed for message in told[before:]))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
