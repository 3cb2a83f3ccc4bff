"""What is told about a replica when it registers, and the words the domain uses for it.

Invariants: a spec never changes; two specs are the same registration exactly when they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from services.runtime.errors import invalid_argument, require_id, require_non_negative

WEIGHTS: Final = "weights"
"""Tag of the weight memory, which every engine has."""

KV_CACHE: Final = "kv_cache"
"""Tag of the KV memory, which every engine has."""


class Role(Enum):
    """Whose GPUs a replica uses."""

    HYBRID = "hybrid"
    STANDALONE = "standalone"
    COLOCATED = "colocated"


class Weights(Enum):
    """What the weight memory holds."""

    INTACT = "intact"
    DISCARDED = "discarded"
    HALF_UPDATED = "half_updated"


class Health(Enum):
    """Whether the engine answers."""

    HEALTHY = "healthy"
    UNRESPONSIVE = "unresponsive"
    DEAD = "dead"


class Route(Enum):
    """What new requests do with a replica."""

    OUT = "out"
    HELD = "held"
    SERVING = "serving"


class PauseMode(Enum):
    """What happens to running requests when scheduling stops."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class Cache(Enum):
    """The caches whose content depends on weights, and the preprocessor's."""

    PREFIX = "prefix"
    MULTIMODAL = "multimodal"
    ENCODER = "encoder"


ALL_CACHES: Final = frozenset(Cache)


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    """One device of one node."""

    node: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Flags:
    """Facts that change how a replica may be handled."""

    lora_as_adapter: bool = False
    mtp_rollout: bool = False
    npu: bool = False
    free_cache_engine: bool = True
    node_rank: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A replica as it was registered.

    `weights_loaded` False means a dummy load: it serves after its first weight update. `weight_version` is None when
    the caller did not say; then what the engine tells counts, else 0.
    """

    replica_id: str
    role: Role
    backend: str
    endpoint: str = ""
    gpus: tuple[Gpu, ...] = ()
    flags: Flags = Flags()
    weights_loaded: bool = True
    weight_version: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    shards: int = 1

    def validate(self) -> None:
        """Refuse what can never be right, with INVALID_ARGUMENT naming the field."""
        require_id("spec.replica_id", self.replica_id)
        for gpu in self.gpus:
            require_id("spec.gpus.node", gpu.node)
            require_id("spec.gpus.uuid", gpu.uuid)
        if len(set(self.gpus)) != len(self.gpus):
            raise invalid_argument("spec.gpus", "a GPU is named twice")
        if self.shards < 1:
            raise invalid_argument("spec.shards", "a replica has at least one shard", value=self.shards)
        require_non_negative("spec.flags.node_rank", self.flags.node_rank)
        if self.weight_version is not None:
            require_non_negative("spec.weight_version", self.weight_version)
            if not self.weights_loaded:
                raise invalid_argument("spec.weight_version", "weights NONE have no version", value=self.weight_version)

    def require_gpus(self) -> None:
        """Refuse a hybrid replica without GPUs. An agent's own need none: its controller knows them."""
        if self.role is Role.HYBRID and not self.gpus:
            raise invalid_argument("spec.gpus", "a hybrid replica must name the GPUs it shares with the trainer")
