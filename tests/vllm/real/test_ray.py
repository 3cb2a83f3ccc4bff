"""A real vLLM in a Ray actor, the way a controller starts it. Only where Ray is beside vLLM: `make test-vllm`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import yaml

from tests.engine import helpers
from tests.ray_deploy.raylets import raylets
from tests.vllm.real.engines import ENVIRONMENT, PROMPT, engine_args, greedy
from tests.vllm.real.test_controller import lend
from turnout.engine.v1 import engine_pb2 as pb

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

KV = 128 << 20
ACTOR = "turnout/engine"


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    """The address of a cluster of two nodes on this machine, and Ray's id of the one that is not its head."""
    with raylets(other="other") as cluster:
        [other] = [node["NodeID"] for node in ray.nodes() if "other" in node["Resources"]]
        yield cluster.address, other


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def controller(
    nodes: tuple[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[helpers.Engine]:
    """A controller with one hybrid replica `r`, whose engine it has started in an actor on the second node."""
    address, node = nodes
    config = tmp_path_factory.mktemp("ray") / "engine.yaml"
    content = {
        "model": str(models / "old" / "tiny-llama"),
        "cpu": True,
        "engine_args": engine_args(KV),
        "environment": ENVIRONMENT,
    }
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    async with helpers.running(vllm_config=config, ray_address=address, probe_interval=0.5) as running:
        options = {"start": "true", "node": node, "num_cpus": "0", "num_gpus": "0"}
        await helpers.register(running, "r", backend="vllm-ray", endpoint=ACTOR, options=options)
        yield running


def look() -> Any:
    """A function for the actor that tells where it runs. It is nested, so that it travels by value."""

    def facts(host: Any) -> tuple[str, int]:
        return __import__("ray").get_runtime_context().get_node_id(), __import__("os").getpid()

    return facts


async def test_an_engine_in_an_actor_is_lent_and_taken_back(
    controller: helpers.Engine, nodes: tuple[str, str], models: Path
) -> None:
    """On the node that was named. Asleep at level 2 its memory is free; woken, it has the weights that were sent."""
    actor = ray.get_actor("engine", "turnout")
    placed, _ = await actor.__ray_call__.remote(look())
    assert placed == nodes[1]
    taken = await helpers.reclaim(controller)
    [outcome] = taken.operation.outcomes
    assert outcome.bytes_freed >= 0.8 * KV
    asleep = (await helpers.replicas(controller))["r"]
    assert asleep.confirmed_free
    assert (asleep.sleep_level, dict(asleep.tag_bytes)) == (pb.SLEEP_LEVEL_TWO, {"weights": 0, "kv_cache": 0})
    await lend(controller, models, "lend", 1)
    sampling = pb.Sampling(temperature=0.0)
    output = await helpers.generate(controller, "a", PROMPT, max_tokens=20, sampling=sampling)
    assert output.tokens == greedy(models / "new" / "tiny-llama")
    lent = (await helpers.replicas(controller))["r"]
    assert lent.tag_bytes["kv_cache"] >= 0.9 * KV


async def test_an_actor_that_is_killed_is_dead_and_leaves_no_engine(controller: helpers.Engine) -> None:
    """Last in this file. Nothing of vLLM holds the node's memory any more."""
    actor = ray.get_actor("engine", "turnout")
    _, pid = await actor.__ray_call__.remote(look())
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(family) > 1
    os.kill(pid, signal.SIGKILL)

    async def dead() -> bool:
        return (await helpers.replicas(controller))["r"].health == pb.REPLICA_HEALTH_DEAD

    await helpers.until(dead, 60)
    _, left = await asyncio.to_thread(psutil.wait_procs, family, timeout=15)
    for one in left:
        one.kill()
    assert not left
