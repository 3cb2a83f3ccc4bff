"""verl's replicas and balancer as the engine controller knows them: Ray actors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from turnout.engine.v1 import engine_pb2


def replica_id(rank: int) -> str:
    """The id of the replica of that rank."""
    return f"replica-{rank}"


def rank_of(id_: str) -> int:
    """The rank in such an id."""
    return int(id_.rpartition("-")[2])


def spec_of(replica: Any, role: engine_pb2.ReplicaRole.ValueType, version: int | None) -> engine_pb2.ReplicaSpec:
    """How a replica is registered. `version`: of the weights it holds, None if they are a dummy load."""
    server = replica.servers[0]
    devices = sorted(set(ray.get([worker.__ray_call__.remote(_device()) for worker in replica.workers])))
    return engine_pb2.ReplicaSpec(
        replica_id=replica_id(replica.replica_rank),
        role=role,
        gpus=[engine_pb2.Gpu(node=node, uuid=device) for node, device in devices],
        backend="verl-ray",
        endpoint=f"{ray.get_runtime_context().namespace}/{ray.get(server.__ray_call__.remote(_name()))}",
        weights=engine_pb2.WEIGHTS_ORIGIN_NONE if version is None else engine_pb2.WEIGHTS_ORIGIN_LOADED,
        weight_version=version,
        flags=engine_pb2.ReplicaFlags(free_cache_engine=bool(replica.config.free_cache_engine)),
    )


def _device() -> Callable[[Any], tuple[str, str]]:
    """A function that tells node and device of a worker. It is nested, so that it travels by value."""

    def device(_: Any) -> tuple[str, str]:
        import ray

        context = ray.get_runtime_context()
        ids = [each for of_kind in context.get_accelerator_ids().values() for each in of_kind]
        return context.get_node_id(), "+".join(ids) or context.get_actor_id()

    return device


def _name() -> Callable[[Any], str]:
    def name(_: Any) -> str:
        import ray

        found: str = ray.get_runtime_context().get_actor_name()
        return found

    return name


class Relay:
    """verl gives its balancer no name; this has one, and passes on what the controller calls."""

    def __init__(self, balancer: Any) -> None:
        self._balancer = balancer

    async def get_all_servers(self) -> Any:
        return await self._balancer.get_all_servers.remote()

    async def add_servers(self, servers: dict[str, Any]) -> Any:
        return await self._balancer.add_servers.remote(servers)

    async def remove_servers(self, server_ids: list[str]) -> Any:
        return await self._balancer.remove_servers.remote(server_ids)

    async def clear_sticky_cache(self) -> Any:
        return await self._balancer.clear_sticky_cache.remote()


def name_balancer(balancer: Any, name: str) -> Any:
    """Give verl's balancer a name, for as long as the answer is kept."""
    return ray.remote(num_cpus=0)(Relay).options(name=name, get_if_exists=False).remote(balancer)
