"""A small job of the demo, and the deployment it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from services.demo.job import GPUS_PER_REPLICA, REPLICAS_PER_NODE, Job
from services.demo.stack import engine_flags
from turnout.ray import ClusterSpec, parse

TRAINER: Final = "trainer"
STANDALONE: Final = "standalone"
HYBRID: Final = "hybrid"
"""Resources of the nodes."""


def small_job(**changes: Any) -> Job:
    """Steps of a second or two: small batches, short responses, fast time."""
    values: dict[str, Any] = {
        "switching": True,
        "time_scale": 0.01,
        "steps": 10,
        "group_size": 2,
        "mini_batch_size": 4,
        "mini_batches": 2,
        "training_s": 40.0,
        "mean_tokens": 3000.0,
        "max_tokens": 6000,
        "standalone_nodes": 2,
        "hybrid_nodes": 1,
    }
    return Job(**{**values, **changes})


def described(job: Job, name: str, data_dir: Path, **more: Any) -> ClusterSpec:
    """The deployment of a job on nodes with the resources above."""
    scale = ["--time-scale", repr(job.time_scale)]
    service = {"port": 0, "flags": scale}
    # A dead engine is noticed soon, as a real one would be within some seconds of its own time scale.
    engine = {"port": 0, "flags": [*scale, "--probe-interval", "1", "--probe-timeout", "2"]}
    groups = [
        {
            "name": role,
            "role": role,
            "resource": role,
            "nodes": nodes,
            "replicas": REPLICAS_PER_NODE,
            "gpus_per_replica": GPUS_PER_REPLICA,
            "flags": [*scale, *engine_flags(job, role)],
        }
        for role, nodes in ((STANDALONE, job.standalone_nodes), (HYBRID, job.hybrid_nodes))
    ]
    return parse(
        {
            "name": name,
            "run": job.run_id,
            "trainer": {"resource": TRAINER},
            "data_dir": str(data_dir),
            "insecure": True,
            "services": {"buffer": service, "scheduler": service, "engine": engine},
            "agents": groups,
            **more,
        }
    )
