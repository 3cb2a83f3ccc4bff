"""Replicas on the wire."""

from __future__ import annotations

from typing import Final

from services.engine.domain.engine_state import EngineState
from services.engine.domain.spec import Flags, Gpu, Health, ReplicaSpec
from services.engine.slot import Slot
from services.engine.wire.enums import HEALTHS, LEVELS, PAUSE_MODES, ROLES, ROUTES, WEIGHTS_ORIGINS, WEIGHTS_STATES
from services.runtime.errors import deadline_exceeded, unavailable
from turnout.engine.v1 import engine_pb2 as pb

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["EngineController"].full_name


def health_name(replica_id: str) -> str:
    """The name under which gRPC health answers for a replica."""
    return f"{_SERVICE}/{replica_id}"


def read_spec(spec: pb.ReplicaSpec) -> ReplicaSpec:
    """A spec as the domain knows it; INVALID_ARGUMENT for an enum without a valid value."""
    flags = spec.flags
    return ReplicaSpec(
        replica_id=spec.replica_id,
        role=ROLES.read("spec.role", spec.role),
        backend=spec.backend,
        endpoint=spec.endpoint,
        gpus=tuple(sorted(read_gpu(gpu) for gpu in spec.gpus)),
        flags=Flags(
            flags.lora_as_adapter,
            flags.mtp_rollout,
            flags.npu,
            flags.free_cache_engine if flags.HasField("free_cache_engine") else True,
            flags.node_rank,
        ),
        weights_loaded=WEIGHTS_ORIGINS.read("spec.weights", spec.weights, default=True),
        weight_version=spec.weight_version if spec.HasField("weight_version") else None,
        options=dict(spec.options),
        shards=spec.shards if spec.HasField("shards") else 1,
    )


def write_spec(spec: ReplicaSpec) -> pb.ReplicaSpec:
    """A spec as it travels."""
    flags = spec.flags
    return pb.ReplicaSpec(
        replica_id=spec.replica_id,
        role=ROLES.write(spec.role),
        gpus=[write_gpu(gpu) for gpu in spec.gpus],
        backend=spec.backend,
        endpoint=spec.endpoint,
        flags=pb.ReplicaFlags(
            lora_as_adapter=flags.lora_as_adapter,
            mtp_rollout=flags.mtp_rollout,
            npu=flags.npu,
            free_cache_engine=flags.free_cache_engine,
            node_rank=flags.node_rank,
        ),
        weights=WEIGHTS_ORIGINS.write(spec.weights_loaded),
        weight_version=spec.weight_version,
        options=spec.options,
        shards=spec.shards,
    )


def read_gpu(gpu: pb.Gpu) -> Gpu:
    """A device."""
    return Gpu(gpu.node, gpu.uuid)


def write_gpu(gpu: Gpu) -> pb.Gpu:
    """A device as it travels."""
    return pb.Gpu(node=gpu.node, uuid=gpu.uuid)


def write_replica(slot: Slot, running: int, parked: int) -> pb.Replica:
    """A replica as the controller sees it now."""
    replica, state = slot.replica, slot.replica.state
    return pb.Replica(
        spec=write_spec(replica.spec),
        health=HEALTHS.write(replica.health),
        route=ROUTES.write(replica.route),
        declared_tags=sorted(state.declared_tags),
        resident_tags=sorted(state.resident_tags),
        sleep_level=LEVELS.write(state.sleep_level),
        paused=state.paused,
        pause_mode=PAUSE_MODES.write(state.pause_mode) if state.pause_mode else pb.PAUSE_MODE_UNSPECIFIED,
        weights=WEIGHTS_STATES.write(replica.weights),
        weight_version=replica.held_version,
        adapter_version=replica.adapter_version,
        cache_version=None if replica.held_version is None else replica.cache_version,
        running=running,
        parked=parked,
        lend_id=replica.lend_id,
        update_id=replica.update_id,
        confirmed_free=replica.confirmed_free,
        memory_bytes=state.memory_bytes,
        tag_bytes=state.tag_bytes,
        capabilities=sorted(state.capabilities),
        reason=replica.why_not_serving,
    )


def read_state(replica: pb.Replica, incarnation: str) -> EngineState:
    """What an agent tells about one of its replicas; raises what a probe of a sick engine raises."""
    health = HEALTHS.read("health", replica.health)
    replica_id = replica.spec.replica_id
    if health is Health.DEAD:
        raise unavailable("ENGINE_DEAD", f"the agent says that the engine of {replica_id} is dead")
    if health is Health.UNRESPONSIVE:
        raise deadline_exceeded("ENGINE_UNRESPONSIVE", f"the agent says that the engine of {replica_id} hangs")
    return EngineState(
        declared_tags=frozenset(replica.declared_tags),
        resident_tags=frozenset(replica.resident_tags),
        sleep_level=LEVELS.read("sleep_level", replica.sleep_level),
        paused=replica.paused,
        pause_mode=PAUSE_MODES.read("pause_mode", replica.pause_mode) if replica.pause_mode else None,
        running=replica.running,
        capabilities=frozenset(replica.capabilities),
        weights=WEIGHTS_STATES.read("weights", replica.weights),
        weight_version=replica.weight_version if replica.HasField("weight_version") else None,
        adapter_version=replica.adapter_version if replica.HasField("adapter_version") else None,
        memory_bytes=replica.memory_bytes if replica.HasField("memory_bytes") else None,
        tag_bytes=dict(replica.tag_bytes) or None,
        incarnation=incarnation,
    )
