"""The demo's loop on a deployment of four nodes, while nodes, actors and processes end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from tests.ray_deploy.accounts import discrepancies
from tests.ray_deploy.crew import Crew
from tests.ray_deploy.jobs import HYBRID, STANDALONE, TRAINER, described, small_job
from tests.ray_deploy.raylets import Raylets, raylets
from turnout import ray as deployments
from turnout.client import AsyncEngineClient
from turnout.engine.v1 import engine_pb2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    # Ray's own.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning"),
]

WITHIN_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(trainer=TRAINER, first=STANDALONE, second=STANDALONE, hybrid=HYBRID) as running:
        yield running


def states(name: str) -> dict[str, deployments.MemberState]:
    return {one.name: one.state for one in deployments.status(name) if one.state is not None}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await condition():  # noqa: ASYNC110 - what is waited for is in other processes
            await asyncio.sleep(0.2)


async def well(name: str) -> bool:
    return not any(one.problem for one in await asyncio.to_thread(deployments.status, name))


async def are(client: AsyncEngineClient, run: str, agent: str, *wanted: int) -> bool:
    """Whether all replicas of an agent have this health and route."""
    answer = await client.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=run))
    own = [replica for replica in answer.replicas if replica.spec.replica_id.startswith(f"{agent}-")]
    return all((replica.health, replica.route) == wanted for replica in own)


def check(crew: Crew, ledger: dict[str, Any]) -> None:
    """Nothing was lost and nothing committed twice, by the books of the workers, the trainer and the buffer."""
    assert discrepancies(crew, ledger, small_job().group_size) == []
    assert ledger["evicted"] == 0
    assert len(crew.said("committed")) * 4 <= ledger["committed"]
    assert any(line["event"] == "acknowledged" for worker in crew.workers for _, line in worker.lines)


async def test_a_node_that_dies_and_comes_back_joins_in_again(cluster: Raylets, tmp_path: Path) -> None:
    """Its replicas would stay DEAD, or worse, serve weights of a time before."""
    job = small_job(steps=500)
    made = deployments.up(described(job, "node", tmp_path), ready_within_s=WITHIN_S)
    dead = (engine_pb2.REPLICA_HEALTH_DEAD, engine_pb2.ROUTE_STATE_OUT)
    serving = (engine_pb2.REPLICA_HEALTH_HEALTHY, engine_pb2.ROUTE_STATE_SERVING)
    try:
        async with Crew(job, made) as crew, AsyncEngineClient(made.engine) as engine:
            await crew.until("step_ended", 2, WITHIN_S)
            node = cluster.node_id("first")
            first = next(name for name, state in states("node").items() if state.node == node)
            await asyncio.to_thread(cluster.kill, "first")
            await until(lambda: are(engine, job.run_id, first, *dead))
            steps = len(crew.said("step_ended"))
            await crew.until("step_ended", steps + 2, WITHIN_S)
            await asyncio.to_thread(cluster.add, "first", STANDALONE)
            await until(lambda: are(engine, job.run_id, first, *serving))
            check(crew, await crew.finish(WITHIN_S))
            assert crew.trainer.ends == []
    finally:
        deployments.down("node")


async def test_the_job_goes_on_while_actors_and_processes_of_its_services_are_killed(
    cluster: Raylets, tmp_path: Path
) -> None:
    """Each of them holds something that the loop cannot do without."""
    job = small_job(steps=500)
    made = deployments.up(described(job, "kills", tmp_path), ready_within_s=WITHIN_S)
    try:
        async with Crew(job, made) as crew:
            await crew.until("step_ended", 2, WITHIN_S)
            for victim, actor in (("buffer", True), ("engine", False), ("scheduler", True)):
                state = states("kills")[victim]
                pid = state.supervisor_pid if actor else state.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                batches = len(crew.said("committed"))
                await crew.until("committed", batches + 3, WITHIN_S)
                await until(lambda: well("kills"))
            check(crew, await crew.finish(WITHIN_S))
            assert crew.trainer.ends == []
    finally:
        deployments.down("kills")


async def test_payloads_in_rays_object_store_reach_the_trainer_over_a_kill_of_the_buffer(
    cluster: Raylets, tmp_path: Path
) -> None:
    """The buffer's journal has the references alone; what it lets go is deleted in the store after a restart, too."""
    job = small_job(steps=4)
    made = deployments.up(described(job, "payloads", tmp_path, payloads="ray"), ready_within_s=WITHIN_S)
    assert made.store == "ray"
    try:
        async with Crew(job, made) as crew:
            await crew.until("committed", 2, WITHIN_S)
            pid = states("payloads")["buffer"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            ledger = await crew.done(WITHIN_S)
            check(crew, ledger)
            assert ledger["committed"] == job.total_groups
            assert crew.trainer.ends == []
    finally:
        deployments.down("payloads")


async def test_the_trainers_node_dies_and_comes_back_with_its_disk(cluster: Raylets, tmp_path: Path) -> None:
    """All three services and the controller of every engine are on it, and the journals."""
    job = small_job(steps=500)
    made = deployments.up(described(job, "trainer", tmp_path), ready_within_s=WITHIN_S)
    try:
        async with Crew(job, made) as crew:
            await crew.until("step_ended", 2, WITHIN_S)
            await asyncio.to_thread(cluster.kill, "trainer")
            await asyncio.to_thread(cluster.add, "trainer", TRAINER)
            batches = len(crew.said("committed"))
            await crew.until("committed", batches + 3, WITHIN_S)
            await until(lambda: well("trainer"))
            check(crew, await crew.finish(WITHIN_S))
            assert deployments.connect("trainer") == made
    finally:
        deployments.down("trainer")
