"""Many runs of one scheduler: what befalls one must not touch another."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from services.runtime.errors import failed_precondition
from services.runtime.host import ServiceHost
from tests.scheduler.fakes import FakeBuffer, FakeEngine, host_buffer, host_engine
from tests.scheduler.world import Trainer, World, run_config, world
from turnout.scheduler.v1 import events_pb2
from turnout.scheduler.v1 import scheduler_pb2 as pb

ONE, OTHER = "one", "other"


@dataclass
class Pair:
    """Two runs, each with a buffer and an engine controller of its own."""

    world: World
    buffers: dict[str, FakeBuffer]
    engines: dict[str, FakeEngine]
    engine_hosts: dict[str, ServiceHost]
    trainers: dict[str, Trainer]

    async def page(self) -> str:
        """The scheduler's metrics."""
        url = self.world.host.metrics_url
        assert url is not None
        with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
            return str(answer.read().decode())


@asynccontextmanager
async def pair(data_dir: Path | None = None) -> AsyncIterator[Pair]:
    async with world(hybrids=0, metrics_listen="127.0.0.1:0", data_dir=data_dir) as w, AsyncExitStack() as stack:
        both = Pair(w, {}, {}, {}, {})
        for name in (ONE, OTHER):
            buffer, engine = FakeBuffer([]), FakeEngine([], name)  # type: ignore[abstract]
            buffer.add_run(name)
            await buffer.set_depth(8)
            engine.add("hybrid", gpu=f"gpu-{name}")
            both.buffers[name], both.engines[name] = buffer, engine
            buffer_host = await stack.enter_async_context(host_buffer(buffer))
            both.engine_hosts[name] = await stack.enter_async_context(host_engine(engine))
            both.trainers[name] = await w.trainer(
                run_id=name, buffer_target=buffer_host.target, engine_target=both.engine_hosts[name].target
            )
        yield both


@pytest.mark.parametrize("call", ["GetSampleableCount", "ListReplicas", "Reclaim", "GetProgress"])
async def test_peers_of_one_run_that_hang_delay_no_other(call: str) -> None:
    """One slow buffer, or a controller in a swap storm, must not hold up the steps of a whole team."""
    async with pair() as both:
        gate = asyncio.Event()
        both.buffers[ONE].script.gates[call] = both.engines[ONE].script.gates[call] = gate
        stuck = asyncio.ensure_future(both.trainers[ONE].step(1))
        for step in (1, 2):
            await both.trainers[OTHER].step(step, wait=3.0)
            await both.trainers[OTHER].heartbeat()
            run = await both.trainers[OTHER].run()
            if run.HasField("lend"):
                await both.trainers[OTHER].complete(run.lend)
        assert call == "GetProgress" or not stuck.done()
        gate.set()
        await stuck
        assert (await both.trainers[ONE].run()).step == 1


async def test_a_dead_controller_of_one_run_fails_that_run_alone() -> None:
    """The other's decisions are made and carried out, and its mode is its own."""
    async with pair() as both:
        await both.engine_hosts[ONE].stop(0)
        with pytest.raises(grpc.aio.AioRpcError):
            await both.trainers[ONE].begin(1)
        await both.trainers[OTHER].step(1)
        runs = {run.run_id: run for run in (await both.world.stub.ListRuns(pb.ListRunsRequest())).runs}
        assert runs[ONE].mode == events_pb2.MODE_RECLAIMING
        assert runs[ONE].stuck_reason
        assert (runs[OTHER].step, runs[OTHER].stuck_reason) == (1, "")


async def test_events_and_metrics_of_runs_are_their_own() -> None:
    """A page that mixes runs up would send whoever is on call to the wrong team."""
    async with pair() as both:
        both.engines[ONE].script.failures["Reclaim"].extend([failed_precondition("BROKEN", "no")] * 3)
        with pytest.raises(grpc.aio.AioRpcError):
            await both.trainers[ONE].begin(1)
        await both.trainers[OTHER].step(1, wait=3.0)
        failed = [event for event in await both.trainers[ONE].events() if event.HasField("transition_failed")]
        assert len(failed) == 1
        assert not any(event.HasField("transition_failed") for event in await both.trainers[OTHER].events())
        text = await both.page()
        waits = {name: f'turnout_sample_wait_seconds_count{{run_id="{name}"}}' for name in (ONE, OTHER)}
        assert f"{waits[OTHER]} 4.0" in text
        assert waits[ONE] not in text


async def test_a_run_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    """A scheduler that serves for a year would drown in the series and records of jobs long gone."""
    async with pair(tmp_path) as both:
        w = both.world
        closing = pb.CloseRunRequest(run_id=ONE, epoch=both.trainers[ONE].epoch)
        await w.stub.CloseRun(closing)
        for number in range(32):
            name = f"run-{number}"
            w.buffer.add_run(name)
            w.engine.run_id, w.engine.epoch = name, 0
            opened = await w.open(run_config(hybrid_gpus=0), run_id=name)
            await w.stub.CloseRun(pb.CloseRunRequest(run_id=name, epoch=opened.epoch))
        assert ONE not in {run.run_id for run in (await w.stub.ListRuns(pb.ListRunsRequest())).runs}
        text = await both.page()
        assert f'run_id="{ONE}"' not in text
        assert f'run_id="{OTHER}"' in text
        await w.restart()
        names = {run.run_id for run in (await w.stub.ListRuns(pb.ListRunsRequest())).runs}
        assert OTHER in names
        assert ONE not in names
