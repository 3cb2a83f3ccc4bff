"""The backend `vllm-ray`: a vLLM engine in a Ray actor, found by its name or started on a node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from services.engine.cluster.actors import Cluster
from services.engine.cluster.host import STARTER
from services.engine.cluster.surface import Placing, attach
from services.engine.domain.spec import ReplicaSpec
from services.engine.guarded.backend import GuardedBackend
from services.engine.vllm.config import VllmConfig
from services.runtime.clock import Clock
from services.runtime.errors import failed_precondition, invalid_argument

OPTIONS: Final = frozenset({"start", "node", "num_gpus", "num_cpus"})
"""`start` "true": start the actor if there is none, on the node with Ray's id `node`, with these resources."""


async def open_backend(
    spec: ReplicaSpec, path: Path | None, cluster: Cluster, clock: Clock, starter: str = STARTER
) -> GuardedBackend:
    """Attach to the actor that `spec.endpoint` names, as NAME or NAMESPACE/NAME."""
    placing = _placing(spec, path, starter)
    surface = await attach(cluster, spec.endpoint, placing)
    return GuardedBackend(spec, surface, clock)


def _placing(spec: ReplicaSpec, path: Path | None, starter: str) -> Placing | None:
    options = spec.options
    start = options.get("start", "false")
    if start not in ("true", "false"):
        raise invalid_argument("spec.options", 'start is "true" or "false"', value=start)
    gpus, cpus = _amount(options, "num_gpus", float(len(spec.gpus))), _amount(options, "num_cpus", 1.0)
    if start == "false":
        if options.keys() - {"start"}:
            raise invalid_argument("spec.options", "only an actor that is started is placed: say start", value=start)
        return None
    if path is None:
        raise failed_precondition("NOT_CONFIGURED", "this service was started without vllm_config")
    try:
        config = VllmConfig.load(path)
    except ValueError as error:
        raise failed_precondition("BAD_VLLM_CONFIG", str(error)) from error
    return Placing(config.model_dump_json(), options.get("node", ""), gpus, cpus, starter)


def _amount(options: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(options.get(name, default))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise invalid_argument("spec.options", f"{name} is a number that is not negative", value=options[name])
    return value
