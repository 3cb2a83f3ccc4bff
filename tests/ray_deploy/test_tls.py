"""deploy/ray/cluster-tls.yaml on a real cluster: mutual TLS and tokens between everything, and a job that uses it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

pytest.importorskip("ray")
from services.demo.job import GPUS_PER_REPLICA, REPLICAS_PER_NODE, Job
from services.demo.stack import engine_flags
from services.runtime.permissions import Role
from tests.deployed.job import Running, at_work, small_job
from tests.deployed.site import Site, own_address
from tests.ray_deploy.raylets import Raylets, raylets
from turnout import ray as deployments
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, ClientOptions, Security, Unauthenticated, Unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    # Ray's own.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning"),
]

FILE: Final = Path(__file__).parents[2] / "deploy" / "ray" / "cluster-tls.yaml"
WITHIN_S: Final = 150.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(trainer="turnout_trainer", rollout="turnout_rollout", hybrid="turnout_hybrid") as running:
        yield running


def described(job: Job, site: Site) -> dict[str, Any]:
    """What the file says, with this machine's places, no GPU, and the speeds of the job."""
    places = {
        "/etc/turnout/tls.pem": site.cert,
        "/etc/turnout/tls.key": site.key,
        "/etc/turnout/ca.pem": site.authority.ca,
        "/etc/turnout/tokens.yaml": site.tokens.path,
        "/etc/turnout/service.token": site.token_file(Role.SERVICE),
        "/etc/turnout/register.token": site.token_file(Role.TRAINER),
        "/var/lib/turnout/my-run": site.root / "data",
        "my-run": job.run_id,
    }
    text = FILE.read_text()
    for there, here in places.items():
        assert there in text
        text = text.replace(there, str(here))
    content: dict[str, Any] = yaml.safe_load(text)
    assert "insecure" not in content
    scale = ["--time-scale", repr(job.time_scale)]
    for service in content["services"].values():
        service["port"] = 0
        service["flags"] = [*service["flags"], *scale]
    content["services"]["engine"]["flags"] += ["--probe-interval", "1", "--probe-timeout", "2"]
    for agents in content["agents"]:
        assert agents["replicas"] == REPLICAS_PER_NODE
        assert agents["gpus_per_replica"] == GPUS_PER_REPLICA
        agents["ray_gpus"] = 0
        agents["flags"] = [*agents["flags"], *scale, *engine_flags(job, agents["role"])]
        agents["env"] = {name: value for name, value in agents["env"].items() if "VLLM" not in name}
    return content


async def test_a_job_trains_over_tls_with_tokens_and_over_kills(cluster: Raylets, tmp_path: Path) -> None:
    """Where it said `insecure: true` because nothing else was ever tried, whoever is on the network moves the GPUs."""
    job = small_job(steps=5, standalone_nodes=1)
    with Site(tmp_path, run_id=job.run_id, identities=[own_address()]) as site:
        spec = deployments.parse(described(job, site))
        made = await asyncio.to_thread(deployments.up, spec, ready_within_s=WITHIN_S)
        try:
            await _strangers_are_kept_out(site, made.buffer)
            targets = {"buffer": made.buffer, "engine": made.engine, "scheduler": made.scheduler}
            async with at_work(Running(job, targets, site.environment)) as loop:
                await loop.until("step_ended", WITHIN_S, step=2)
                states = {one.name: one.state for one in await asyncio.to_thread(deployments.status)}
                for victim in ("buffer", "engine"):
                    state = states[victim]
                    assert state is not None
                    assert state.pid is not None
                    os.kill(state.pid, signal.SIGKILL)
                ledger = await loop.done(WITHIN_S)
                assert [line["step"] for line in loop.said("step_ended")] == list(range(1, job.steps + 1))
            assert (ledger["committed"], ledger["evicted"], ledger["present"]) == (job.total_groups, 0, 0)
            assert not [one for one in await asyncio.to_thread(deployments.status) if one.problem]
        finally:
            await asyncio.to_thread(deployments.down)


async def _strangers_are_kept_out(site: Site, target: str) -> None:
    request = buffer_pb2.ListRunsRequest()
    known = Security(ca=site.authority.ca, cert=site.cert, key=site.key)
    async with AsyncBufferClient(target, ClientOptions(security=known)) as client:
        with pytest.raises(Unauthenticated):
            await client.calls.ListRuns(request)
    for stranger in (Security(ca=site.authority.ca), Security()):
        async with AsyncBufferClient(target, ClientOptions(security=stranger)) as client:
            with pytest.raises(Unavailable):
                await client.calls.ListRuns(request, timeout=5)
