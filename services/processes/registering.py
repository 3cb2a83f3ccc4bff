"""Makes the replicas of agents known to a controller.

Invariants: what an agent says of its replicas is what the controller is told; nobody invents GPUs but for the reference
engine, which has none: there each replica is its own device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from turnout.client import AsyncEngineClient, ClientOptions
from turnout.engine.v1 import engine_pb2

_REFERENCE: Final = "reference"

Gpus = Mapping[str, Iterable[engine_pb2.Gpu]]
"""The devices of each replica, by its id."""


class NoGpus(ValueError):
    """A hybrid replica of a real engine whose devices nobody named."""


async def register_agent(
    engine: AsyncEngineClient, agent: str, run_id: str, gpus: Gpus, options: ClientOptions | None = None
) -> list[engine_pb2.Replica]:
    """Register every replica of an agent (a gRPC target, as the controller reaches it) and return them as probed.

    Repeating it is fine. Raises NoGpus before anything is registered, TurnoutError if agent or controller refuse.
    """
    async with AsyncEngineClient(agent, options) as client:
        answer = await client.calls.ListReplicas(engine_pb2.ListReplicasRequest(run_id=run_id))
    specs = [_spec(replica.spec, agent, gpus.get(replica.spec.replica_id, ())) for replica in answer.replicas]
    return [await register(engine, run_id, spec) for spec in specs]


async def register(engine: AsyncEngineClient, run_id: str, spec: engine_pb2.ReplicaSpec) -> engine_pb2.Replica:
    """Register one replica. Raises TurnoutError."""
    answer = await engine.calls.Register(engine_pb2.RegisterRequest(run_id=run_id, spec=spec))
    return answer.replica


def _spec(own: engine_pb2.ReplicaSpec, agent: str, gpus: Iterable[engine_pb2.Gpu]) -> engine_pb2.ReplicaSpec:
    spec = engine_pb2.ReplicaSpec()
    spec.CopyFrom(own)
    spec.backend, spec.endpoint = "agent", agent
    spec.ClearField("options")  # the agent's own
    if gpus := list(gpus):
        del spec.gpus[:]
        spec.gpus.extend(gpus)
    if not spec.gpus and own.backend == _REFERENCE:
        spec.gpus.add(node=agent, uuid=spec.replica_id)
    if not spec.gpus and spec.role == engine_pb2.REPLICA_ROLE_HYBRID:
        raise NoGpus(
            f"{spec.replica_id} is hybrid: name the GPUs it shares with the trainer, --gpu {spec.replica_id}=NODE/UUID"
        )
    return spec
