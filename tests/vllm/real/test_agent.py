"""The way a user starts it: an agent with a vLLM engine in its process, under a controller. Also the smoke test."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import google_crc32c
import psutil
import pytest
import yaml

from tests.engine import helpers
from tests.vllm.real.engines import ENVIRONMENT, PROMPT, engine_args, greedy, weights_file
from turnout.engine.v1 import engine_pb2 as pb

TURNOUT = Path(sys.executable).with_name("turnout")


@asynccontextmanager
async def agent(
    directory: Path, model: Path, weights: bool = False
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """An agent with one replica `h`, whose weights have to come first unless told otherwise; its process and target."""
    config = directory / "engine.yaml"
    content = {
        "model": str(model),
        "cpu": True,
        "engine_args": engine_args(128 << 20),
        "environment": ENVIRONMENT,
        "spool": str(directory),
    }
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    arguments = ["engine", "serve", "--agent", "--listen", "127.0.0.1:0", "--log-level", "error"]
    arguments += ["--replica", "h:standalone" if weights else "h:hybrid", "--vllm-config", str(config)]
    arguments += [] if weights else ["--no-replica-weights"]
    process = await asyncio.create_subprocess_exec(TURNOUT, *arguments, stdout=asyncio.subprocess.PIPE)
    family: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        target = ""
        async with asyncio.timeout(300):
            # vLLM writes to stdout as well.
            while line := await process.stdout.readline():
                if line.startswith(b"turnout engine listening on "):
                    target = line.decode().strip().rpartition(" ")[2]
                    break
        assert target, "the agent did not start"
        family = psutil.Process(process.pid).children(recursive=True)
        yield process, target
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(30):
            await process.communicate()
        _, left = await asyncio.to_thread(psutil.wait_procs, family, timeout=15)
        for one in left:
            one.kill()
        assert not left, "the engine's processes outlived their agent"


@pytest.mark.smoke
async def test_a_lend_with_a_real_engine(models: Path, tmp_path: Path) -> None:
    """Registered without weights, lent, updated, asked, taken back: the memory is free afterwards, the process ends."""
    data = weights_file(models).read_bytes()
    async with agent(tmp_path, models / "old" / "tiny-llama") as (process, target), helpers.running() as controller:
        await helpers.register(
            controller, "h", backend="agent", endpoint=target, weights=pb.WEIGHTS_ORIGIN_NONE, gpus=[shared_gpu()]
        )
        await helpers.reclaim(controller)
        asleep = (await helpers.replicas(controller))["h"]
        assert asleep.confirmed_free
        await controller.stub.BeginLend(pb.BeginLendRequest(run_id=helpers.RUN, lend_id="lend"))
        begun = await controller.stub.BeginWeightUpdate(
            pb.BeginWeightUpdateRequest(run_id=helpers.RUN, weight_version=1, kind=pb.UPDATE_KIND_ASLEEP)
        )
        await helpers.move_weights(controller, begun.update_id, data, chunk=65536)
        await helpers.vacate(controller, begun)
        acks = [pb.UpdateAck(replica_id="h", ok=True, checksum=f"{google_crc32c.value(data):08x}")]
        await controller.stub.CommitWeightUpdate(
            pb.CommitWeightUpdateRequest(run_id=helpers.RUN, update_id=begun.update_id, acks=acks)
        )
        await controller.stub.FinishLend(pb.FinishLendRequest(run_id=helpers.RUN, lend_id="lend", weight_version=1))
        lent = (await helpers.replicas(controller))["h"]
        assert lent.memory_bytes - asleep.memory_bytes >= 0.8 * (128 << 20)
        sampling = pb.Sampling(temperature=0.0, logprobs=True)
        output = await helpers.generate(controller, "a", PROMPT, max_tokens=20, sampling=sampling)
        assert output.tokens == greedy(models / "new" / "tiny-llama")
        taken = await helpers.reclaim(controller)
        [outcome] = taken.operation.outcomes
        assert outcome.bytes_freed >= 0.8 * (128 << 20)
        assert (await helpers.replicas(controller))["h"].confirmed_free
    assert process.returncode == 0
    assert not any(name.startswith("turnout-weights-") for name in os.listdir(tmp_path)), "no file outlives its move"


async def test_an_agent_that_is_killed_takes_its_engine_with_it(models: Path, tmp_path: Path) -> None:
    """Nothing is left to hold the device."""
    async with agent(tmp_path, models / "old" / "tiny-llama") as (process, _):
        os.kill(process.pid, signal.SIGKILL)


async def test_h50_sigterm_ends_an_agent_whose_engine_is_at_work(models: Path, tmp_path: Path) -> None:
    """With a request that runs: the process ends by itself in time, and nothing of vLLM stays (see `agent`)."""
    started = agent(tmp_path, models / "old" / "tiny-llama", weights=True)
    async with started as (process, target), helpers.running() as controller:
        await helpers.register(controller, "h", "standalone", backend="agent", endpoint=target)
        running = asyncio.create_task(helpers.generate(controller, "a", PROMPT, max_tokens=1000))
        await helpers.until(lambda: bool(controller.controller.fleet.get("h").forwards), 30)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def shared_gpu() -> pb.Gpu:
    """The device that the replica shares with its trainer."""
    return pb.Gpu(node="n0", uuid="gpu-0")
