"""What the engine controller can be told; the same program is a node agent with `--agent`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from services.engine.domain.spec import Role
from services.runtime.config import Strings, settings_config
from services.runtime.journal import DURABILITY_HELP, Durability, durability_of
from services.runtime.peers import PeerSettings


@dataclass(frozen=True, slots=True)
class OwnReplica:
    """A replica that an agent has from its start."""

    replica_id: str
    role: Role


class EngineSettings(PeerSettings):
    """Settings of the engine controller."""

    model_config = settings_config("engine")

    listen: Strings = Field(
        ["127.0.0.1:50052"],
        min_length=1,
        description="Where to listen: HOST:PORT, [IPV6]:PORT or unix:/PATH. Port 0 takes a free port and prints it.",
    )
    data_dir: Path | None = Field(
        None,
        description="Directory, on a local disk, for all that must survive a restart; without one nothing does. "
        "Engines go on without their controller, and are probed when it comes back.",
    )
    durability: Durability | None = Field(
        None,
        description=f"With a data directory, {DURABILITY_HELP}. Default: os with a data directory, else none.",
    )
    run: str = Field("", description="Serve this run only; unset: the first OpenEpoch or Register decides.")
    agent: bool = Field(
        False, description="Be a node agent: own the replicas of this node, for a controller elsewhere."
    )
    replica: Strings = Field([], description="With --agent: a replica of this node, as ID:ROLE (hybrid, standalone).")
    replica_weights: bool = Field(
        True, description="With --agent: whether the replicas start with weights; otherwise they need an update first."
    )
    vllm_config: Path | None = Field(
        None,
        description="YAML file with a model and engine arguments: the backend vllm-inproc runs it in this process, and "
        "so do the replicas of an agent in place of the reference engine.",
    )
    engine_timeout: float = Field(
        120.0, gt=0, le=86400, description="Seconds an engine has for one call, if the caller does not say."
    )
    probe_interval: float = Field(5.0, gt=0, le=3600, description="Seconds between two health probes of a replica.")
    probe_timeout: float = Field(
        5.0, gt=0, le=3600, description="Seconds after which a replica that answers no probe is unresponsive."
    )
    allow_method: Strings = Field([], description="A method that CollectiveRpc may call; none are allowed by default.")
    route_hook: Strings = Field(
        [], description="URL that every membership is posted to, for a router that serves without this controller."
    )
    route_hook_holds: bool = Field(
        False, description="Whether the route hooks can hold requests for replicas that are being lent."
    )
    ray_address: str = Field(
        "", description="Ray cluster with engines or balancers that are actors; default: the one of the environment."
    )
    verl_balancer: str = Field(
        "", description="Actor of verl's load balancer, as NAME or NAMESPACE/NAME: its servers follow the routes."
    )
    fault_injection: bool = Field(False, description="Allow CollectiveRpc to break engines on command, for tests.")

    decode_base: float = Field(
        0.00975, gt=0, description="Reference engine: domain seconds of a decode iteration, without its requests."
    )
    decode_per_request: float = Field(
        0.000078, ge=0, description="Reference engine: domain seconds that each running request adds to an iteration."
    )
    prefill_rate: float = Field(60_000.0, gt=0, description="Reference engine: prompt tokens per domain second.")
    length_mean: float = Field(13_000.0, ge=1, description="Reference engine: mean output length, in tokens.")
    length_log_std: float = Field(
        0.75, ge=0, le=5, description="Reference engine: standard deviation of the logarithm of output lengths."
    )
    length_between_prompts: float = Field(
        0.85, ge=0, le=1, description="Reference engine: share of that variance which lies between prompts."
    )
    vocabulary: int = Field(32_000, ge=32, le=2**31 - 1, description="Reference engine: number of token ids.")
    weights_bytes: int = Field(4 << 20, ge=1, description="Reference engine: bytes of weight memory, per shard.")
    kv_bytes: int = Field(16 << 20, ge=1, description="Reference engine: bytes of KV memory, per shard.")
    sleep_seconds: float = Field(0.0, ge=0, description="Reference engine: domain seconds that going to sleep takes.")
    wake_seconds: float = Field(0.0, ge=0, description="Reference engine: domain seconds that a wake takes.")
    load_seconds: float = Field(0.0, ge=0, description="Reference engine: domain seconds that loading weights takes.")

    @field_validator("replica", "allow_method", "route_hook", mode="before")
    @classmethod
    def _commas(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("replica")
    @classmethod
    def _parts(cls, value: list[str]) -> list[str]:
        ids = [parse_replica(text).replica_id for text in value]
        if len(set(ids)) != len(ids):
            raise ValueError("a replica id is given twice")
        return value

    @field_validator("route_hook")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise ValueError(f"{url!r} is no http or https URL")
        if len(set(value)) != len(value):
            raise ValueError("a URL is given twice")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> EngineSettings:
        if self.replica and not self.agent:
            raise ValueError("replica: only an agent has replicas of its own; add --agent, or Register them")
        if self.agent and self.data_dir is not None:
            raise ValueError("data_dir: an agent keeps nothing, its engines end with it")
        durability_of(self.durability, self.data_dir)
        return self

    @property
    def own_backend(self) -> str:
        """What the replicas of an agent run on."""
        return "vllm-inproc" if self.vllm_config else "reference"

    @property
    def level(self) -> Durability:
        """The durability that holds."""
        return durability_of(self.durability, self.data_dir)

    @property
    def own_replicas(self) -> list[OwnReplica]:
        """The replicas of an agent."""
        return [parse_replica(text) for text in self.replica]


def parse_replica(text: str) -> OwnReplica:
    """Read ID:ROLE; raises ValueError with a sentence for a person."""
    replica_id, separator, role = text.rpartition(":")
    if not separator or not replica_id:
        raise ValueError(f"{text!r} is not ID:ROLE, such as hybrid-0:hybrid")
    try:
        return OwnReplica(replica_id, Role(role))
    except ValueError:
        roles = ", ".join(known.value for known in Role)
        raise ValueError(f"{text!r} has the unknown role {role!r}; roles are {roles}") from None
