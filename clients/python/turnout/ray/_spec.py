"""The YAML file of a deployment: what runs where.

Invariants: a key that is not known is an error that names it; every fault of a file comes out as one line with its
place; nothing here knows Ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from turnout.ray._errors import DeploymentError

try:
    import yaml
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
except ImportError as missing:
    raise ImportError("a deployment on Ray needs more packages: pip install 'turnout[ray]'") from missing

SERVICES: Final = ("buffer", "scheduler", "engine")
"""The services of the trainer's node, in the order of their starts."""

_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$"


Port = Annotated[int, Field(ge=0, le=65535)]
"""0: one that is free is chosen at `up` and kept from then on."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Place(_Model):
    """A node, by its address or by a resource that it offers."""

    ip: str = ""
    resource: str = ""

    @model_validator(mode="after")
    def _one(self) -> Place:
        if bool(self.ip) == bool(self.resource):
            raise ValueError("give either ip or resource")
        return self


class ServiceSpec(_Model):
    """How one service is started."""

    port: Port
    flags: list[str] = []
    """Further arguments of `turnout SERVICE serve`."""
    env: dict[str, str] = {}
    """Environment variables of its process."""


class ServicesSpec(_Model):
    """The three services of the trainer's node."""

    buffer: ServiceSpec = ServiceSpec(port=50051)
    engine: ServiceSpec = ServiceSpec(port=50052)
    scheduler: ServiceSpec = ServiceSpec(port=50053)


class AgentsSpec(_Model):
    """Engine agents of one kind, one on each node."""

    name: str = Field(pattern=_NAME)
    role: Literal["standalone", "hybrid"]
    resource: str = ""
    """Each agent takes one unit of it, so nodes that offer one have one agent."""
    nodes: int = Field(0, ge=0, le=10_000)
    """How many, with `resource`."""
    ips: list[str] = []
    """Or: on the nodes with these addresses."""
    replicas: int = Field(1, ge=1, le=64)
    """Of each agent."""
    gpus_per_replica: int = Field(1, ge=1, le=64)
    ray_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for an agent; none where the trainer's own actors have them."""
    port: Port = 0
    flags: list[str] = []
    env: dict[str, str] = {}

    @model_validator(mode="after")
    def _one(self) -> AgentsSpec:
        if bool(self.ips) == bool(self.resource):
            raise ValueError("give either ips, or resource with nodes")
        if self.resource and not self.nodes:
            raise ValueError("resource needs nodes, the number of nodes that offer it")
        if self.ips and self.nodes:
            raise ValueError("nodes goes with resource; ips are counted")
        if len(set(self.ips)) != len(self.ips):
            raise ValueError("an address of ips is given twice")
        return self

    @property
    def places(self) -> list[Place]:
        """Where its agents go."""
        return [Place(ip=ip) for ip in self.ips] or [Place(resource=self.resource)] * self.nodes


class ClusterSpec(_Model):
    """A whole deployment."""

    name: str = Field("turnout", pattern=_NAME)
    run: str = Field(min_length=1, max_length=256)
    trainer: Place
    data_dir: Path | None = None
    insecure: bool = False
    payloads: Literal["buffer", "ray"] = "buffer"
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    services: ServicesSpec = ServicesSpec()
    agents: list[AgentsSpec] = []

    @property
    def store(self) -> str:
        """The external payload store, empty for the buffer's own."""
        return "" if self.payloads == "buffer" else self.payloads

    @model_validator(mode="after")
    def _fits_together(self) -> ClusterSpec:
        names = [agents.name for agents in self.agents]
        if len(set(names)) != len(names):
            raise ValueError("agents: a name is given twice")
        if self.data_dir is not None and not self.data_dir.is_absolute():
            raise ValueError("data_dir: must be absolute, it is a path on the trainer's node")
        ports = [service.port for service in (self.services.buffer, self.services.engine, self.services.scheduler)]
        given = [port for port in ports if port]
        if len(set(given)) != len(given):
            raise ValueError("services: a port is given twice")
        return self


def load(path: Path | str) -> ClusterSpec:
    """Read a deployment from its YAML file; raises DeploymentError with every fault."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DeploymentError(f"{path}: cannot be read: {why}") from error
    except yaml.YAMLError as error:
        raise DeploymentError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise DeploymentError(f"{path}: must hold settings by name")
    return parse(content, str(path))


def parse(content: dict[str, Any], origin: str = "deployment") -> ClusterSpec:
    """Return the deployment that plain values mean; raises DeploymentError with every fault."""
    try:
        return ClusterSpec.model_validate(content)
    except ValidationError as error:
        raise DeploymentError(*(f"{origin}: {_line(problem)}" for problem in error.errors())) from error


def _line(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {place}"
    if problem["type"] == "missing":
        return f"{place} is missing"
    return f"{place}: {message}" if place else message
