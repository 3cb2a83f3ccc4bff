"""The processes of one job: three services, one agent per node, the rollout workers.

Invariants: everything listens on loopback ports that the system gave; the controller knows all replicas before a worker
or the trainer starts; hybrid replicas register with dummy weights, as in a trainer's init.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from services.demo.assignment import READY, Assignment
from services.demo.job import GPUS_PER_REPLICA, REPLICAS_PER_NODE, WEIGHT_BYTES, Job
from services.processes.child import ChildSpec
from services.processes.fleet import Fleet
from services.processes.registering import Gpus, register_agent
from services.processes.service import service_spec
from turnout.client import AsyncEngineClient
from turnout.engine.v1 import engine_pb2

WORKERS: Final = 2
"""Rollout worker processes."""

_ANY_PORT: Final = ("--listen", "127.0.0.1:0")
_QUIET: Final = ("--log-level", "warning")


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the job, as far as the demo has machines."""

    name: str
    role: str
    replica_ids: tuple[str, ...]


def nodes(job: Job) -> Iterator[Node]:
    """Yield the job's nodes with their replicas."""
    for role, count in (("standalone", job.standalone_nodes), ("hybrid", job.hybrid_nodes)):
        for number in range(count):
            first = number * REPLICAS_PER_NODE
            ids = tuple(f"{role}-{first + place}" for place in range(REPLICAS_PER_NODE))
            yield Node(f"{role}-node-{number}", role, ids)


def replicas(job: Job) -> list[dict[str, str]]:
    """Return the job's replicas as the event file names them."""
    return [{"replica_id": replica_id, "role": node.role} for node in nodes(job) for replica_id in node.replica_ids]


async def start_services(fleet: Fleet, assignment: Assignment) -> Assignment:
    """Start services and agents, register the replicas, and return the assignment with the targets filled in."""
    job = assignment.job
    scale = ("--time-scale", repr(job.time_scale))
    all_nodes = list(nodes(job))
    specs = [service_spec(name, *_ANY_PORT, *_QUIET, *scale) for name in ("buffer", "engine", "scheduler")]
    specs += [_agent_spec(job, node, scale) for node in all_nodes]
    buffer, engine, scheduler, *agents = await fleet.start_all(*specs)
    async with AsyncEngineClient(engine.target) as client:
        for node, agent in zip(all_nodes, agents, strict=True):
            await register_agent(client, agent.target, job.run_id, _gpus(node))
    return replace(assignment, buffer=buffer.target, engine=engine.target, scheduler=scheduler.target)


async def start_workers(fleet: Fleet, assignment: Assignment) -> None:
    """Start the rollout workers."""
    names = [f"worker-{number}" for number in range(WORKERS)]
    specs = [
        ChildSpec(name, "services.demo.worker", (replace(assignment, worker_id=name).to_json(),), ready=READY)
        for name in names
    ]
    await fleet.start_all(*specs)


def engine_flags(job: Job, role: str) -> list[str]:
    """Return the arguments that make the engines of an agent those of the job."""
    hybrid = role == "hybrid"
    # A lend wakes weights, loads them and wakes KV; two wakes, and the rest of its time is the load.
    wake_s = job.lend_s / 6
    load_s = job.lend_s - 2 * wake_s if hybrid else job.sync_s
    arguments = {
        "--sleep-seconds": job.reclaim_s if hybrid else 0.0,
        "--wake-seconds": wake_s if hybrid else 0.0,
        "--load-seconds": load_s,
        "--decode-base": job.decode_base_s,
        "--decode-per-request": job.decode_slope_s,
        "--prefill-rate": job.prefill_tokens_per_s,
        "--length-mean": job.mean_tokens,
        "--length-log-std": job.log_std,
        "--length-between-prompts": job.between_prompts,
        "--weights-bytes": WEIGHT_BYTES,
    }
    return [text for name, value in arguments.items() for text in (name, repr(value))]


def _agent_spec(job: Job, node: Node, scale: tuple[str, ...]) -> ChildSpec:
    flags = engine_flags(job, node.role)
    for replica_id in node.replica_ids:
        flags += ["--replica", f"{replica_id}:{node.role}"]
    return service_spec(
        "engine", "--agent", "--no-replica-weights", *_ANY_PORT, *_QUIET, *scale, *flags, name=f"agent of {node.name}"
    )


def _gpus(node: Node) -> Gpus:
    return {
        replica_id: [engine_pb2.Gpu(node=node.name, uuid=f"GPU-{replica_id}-{n}") for n in range(GPUS_PER_REPLICA)]
        for replica_id in node.replica_ids
    }
