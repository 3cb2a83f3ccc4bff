"""The processes of one job: three services, an agent with a real vLLM engine for each replica, a worker.

Invariants: everything listens on loopback ports that the system gave; both engines start with another seed's weights
and serve only once the trainer's have come; all compute in float32 on one thread each.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from services.demo.assignment import READY
from services.learner.assignment import Assignment
from services.learner.job import REPLICAS, Job
from services.learner.model import POSITIONS, make_model, write_model
from services.processes.child import Child, ChildSpec
from services.processes.fleet import Fleet
from services.processes.registering import register_agent
from services.processes.service import service_spec
from turnout.client import AsyncEngineClient
from turnout.engine.v1 import engine_pb2

ENGINE_WITHIN_S: Final = 420.0
"""Half a minute on a machine that has nothing else to do."""

READINGS_S: Final = 2.0
"""Between two readings of what the engines do, the shortest there is: a whole step takes a few seconds here."""

OTHER_SEED: Final = 1_000_003
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
_ANY_PORT: Final = ("--listen", "127.0.0.1:0")
_QUIET: Final = ("--log-level", "warning")


async def start_stack(fleet: Fleet, assignment: Assignment, directory: Path) -> Assignment:
    """Start everything but the trainer; return the assignment with the targets filled in."""
    job = assignment.job
    model = await asyncio.to_thread(_write_other_model, job, directory)
    specs = [service_spec(name, *_ANY_PORT, *_QUIET) for name in ("buffer", "engine")]
    specs.append(service_spec("scheduler", *_ANY_PORT, *_QUIET, "--progress-interval-s", repr(READINGS_S)))
    services = fleet.start_all(*specs)
    agents = asyncio.gather(*(_start_agent(fleet, job, replica, model, directory) for replica in REPLICAS))
    (buffer, engine, scheduler), hosts = await asyncio.gather(services, agents)
    async with AsyncEngineClient(engine.target) as client:
        for place, (entry, host) in enumerate(zip(REPLICAS, hosts, strict=True)):
            gpu = engine_pb2.Gpu(node="localhost", uuid=f"CPU-{place}")
            await register_agent(client, host.target, job.run_id, {entry["replica_id"]: [gpu]})
    known = replace(assignment, buffer=buffer.target, engine=engine.target, scheduler=scheduler.target)
    worker = ChildSpec("worker", "services.learner.worker", (known.to_json(),), ready=READY, environment=ENVIRONMENT)
    await fleet.start(worker)
    return known


def engine_config(job: Job, role: str, model: Path, spool: Path) -> dict[str, Any]:
    """Return what the agent of a replica reads as `--vllm-config`."""
    return {
        "model": str(model),
        "cpu": True,
        "engine_args": {
            "dtype": "float32",
            "max_model_len": POSITIONS,
            "max_num_seqs": job.batch_size * job.group_size,
            "kv_cache_memory_bytes": job.hybrid_kv_bytes if role == "hybrid" else job.standalone_kv_bytes,
            "gpu_memory_utilization": 0.1,
            # Two engines of one seed would give the same answers to the same prompts.
            "seed": job.seed + (0 if role == "hybrid" else OTHER_SEED),
        },
        "spool": str(spool),
    }


async def _start_agent(fleet: Fleet, job: Job, entry: dict[str, str], model: Path, directory: Path) -> Child:
    replica_id, role = entry["replica_id"], entry["role"]
    path = directory / f"{replica_id}.yaml"
    path.write_text(yaml.safe_dump(engine_config(job, role, model, directory)), encoding="utf-8")
    arguments = ("--agent", "--no-replica-weights", "--replica", f"{replica_id}:{role}", "--vllm-config", str(path))
    spec = service_spec("engine", *arguments, *_ANY_PORT, *_QUIET, name=f"agent of {replica_id}")
    return await fleet.start(replace(spec, environment=ENVIRONMENT), ready_within_s=ENGINE_WITHIN_S)


def _write_other_model(job: Job, directory: Path) -> Path:
    # An engine that answered without having taken the trainer's weights would be found out by the first comparison.
    return write_model(make_model(job.seed + OTHER_SEED), directory / "model")
