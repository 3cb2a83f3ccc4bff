"""The members of a deployment: each is one actor with one service process.

Invariants: a member is plain values and describes its process completely, so an actor that Ray starts again needs
nobody to tell it anything; the port is part of it, since clients keep an address.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from turnout.ray._spec import SERVICES, AgentsSpec, ClusterSpec, Place

NAMESPACE: Final = "turnout"
"""Ray namespace of the actors, whatever the caller's own is."""

ANSWER_S: Final = 5.0
"""Wall seconds for an actor to answer: it does so from memory."""

CHOSEN_PORTS: Final = range(20_000, 30_000)
"""Below the ports that Linux gives to connections and above those of Ray's workers, so that a port which is free now
is most likely free when the service comes back."""


@dataclass(frozen=True, slots=True)
class ReplicaName:
    """A replica of an agent."""

    replica_id: str
    role: str
    node: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """One actor and the process it keeps running."""

    deployment: str
    name: str
    """`buffer`, `scheduler`, `engine`, or that of an agent: GROUP-NUMBER."""
    run: str
    store: str
    """Payload store of the run, empty for the buffer's own."""
    service: str
    """Which `turnout SERVICE serve` it is."""
    resource: str
    """Ray resource of its node."""
    amount: float
    """How much of it the actor takes."""
    gpus: float
    port: int
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    replicas: tuple[ReplicaName, ...] = ()

    @property
    def actor_name(self) -> str:
        """Its name in the namespace of deployments."""
        return f"{self.deployment}/{self.name}"


@dataclass(frozen=True, slots=True)
class MemberState:
    """How the process of a member is, as its actor knows."""

    name: str
    host: str
    """Address of its node."""
    node: str
    """Ray's id of its node."""
    target: str = ""
    """Where it serves; empty while it does not."""
    pid: int | None = None
    supervisor_pid: int = 0
    starts: int = 0
    """Of the process, since the actor was started (again)."""
    last_end: str = ""
    """How the process before ended, and the last it said."""
    unregistered: tuple[str, ...] = ()
    """Replicas of an agent that the controller does not have."""
    registration: str = ""
    """Why."""


def members(spec: ClusterSpec) -> Iterator[Member]:
    """Yield the members in the order of their starts; ports that are to be chosen are 0."""
    common = ("--log-level", spec.log_level, *(("--insecure",) if spec.insecure else ()))
    trainer, amount = _demand(spec.trainer)
    for name in SERVICES:
        service = getattr(spec.services, name)
        kept = () if spec.data_dir is None else ("--data-dir", str(spec.data_dir / name))
        own = ("--run", spec.run) if name == "engine" else ()
        yield Member(
            spec.name,
            name,
            spec.run,
            spec.store,
            name,
            trainer,
            min(amount, _SHARE),
            0.0,
            service.port,
            (*common, *kept, *own, *service.flags),
            tuple(sorted(service.env.items())),
        )
    for agents in spec.agents:
        for number, place in enumerate(agents.places):
            yield _agent(spec, agents, number, place, common)


def with_port(member: Member, rng: random.Random, taken: set[int], known: int = 0) -> Member:
    """Return it with a port: its own, else `known`, else one that is chosen and not among `taken`."""
    if member.port:
        return member
    port = known or rng.choice([port for port in CHOSEN_PORTS if port not in taken])
    return dataclasses.replace(member, port=port)


_SHARE: Final = 0.001
"""The three services share the trainer's node, and leave nearly all of the resource to others."""


def _demand(place: Place) -> tuple[str, float]:
    # Ray gives every node a resource of its address.
    return (f"node:{place.ip}", _SHARE) if place.ip else (place.resource, 1.0)


def _agent(spec: ClusterSpec, agents: AgentsSpec, number: int, place: Place, common: tuple[str, ...]) -> Member:
    name = f"{agents.name}-{number}"
    resource, amount = _demand(place)
    replicas = []
    for index in range(agents.replicas):
        first = index * agents.gpus_per_replica
        gpus = tuple(f"gpu-{gpu}" for gpu in range(first, first + agents.gpus_per_replica))
        replicas.append(ReplicaName(f"{name}-{index}", agents.role, name, gpus))
    own = [text for replica in replicas for text in ("--replica", f"{replica.replica_id}:{agents.role}")]
    return Member(
        spec.name,
        name,
        spec.run,
        spec.store,
        "engine",
        resource,
        amount,
        agents.ray_gpus,
        agents.port,
        ("--agent", "--no-replica-weights", *common, *own, *agents.flags),
        tuple(sorted(agents.env.items())),
        tuple(replicas),
    )
