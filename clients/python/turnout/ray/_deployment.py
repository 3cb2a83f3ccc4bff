"""Making, finding and ending a deployment.

Invariants: `up` returns when all services serve and all replicas are registered, and otherwise takes back what it
started; what runs as described is left alone, so it can be repeated; nothing depends on the process that called it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from turnout.ray import _cluster as cluster
from turnout.ray._errors import DeploymentError
from turnout.ray._member import Member, MemberState, members, with_port
from turnout.ray._spec import SERVICES, ClusterSpec, load

READY_WITHIN_S: Final = 300.0
"""Wall seconds: an engine may load its model before its agent serves."""

_LOOK_EVERY_S: Final = 0.2
_STOP_WITHIN_S: Final = 30.0
"""Above the grace that an actor gives its process."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where a deployment's services are: plain values, good to send to trainers and workers."""

    name: str
    run: str
    buffer: str
    engine: str
    scheduler: str
    store: str | None = None
    """For `WorkerSetup.store`."""
    agents: dict[str, str] = field(default_factory=dict)
    """gRPC targets by name."""

    @property
    def stores(self) -> list[str]:
        """For `TrainerSetup.stores`."""
        return [self.store] if self.store else []


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member, and what is wrong with it."""

    name: str
    state: MemberState | None
    """None: its actor does not answer."""
    problem: str
    """Empty: it serves, and its replicas are registered."""


def up(
    spec: ClusterSpec | Path | str,
    *,
    address: str = "auto",
    ready_within_s: float = READY_WITHIN_S,
    rng: random.Random | None = None,
) -> Deployment:
    """Start what `spec` (or the YAML file of this path) describes, and wait until it serves.

    Raises DeploymentError if the cluster lacks a node, a service does not start, or other services run under the name.
    """
    described = spec if isinstance(spec, ClusterSpec) else load(spec)
    ray = cluster.join(address)
    there = _running(ray, described.name)
    wanted = _with_ports(list(members(described)), there, rng or random.Random())
    new = _new(wanted, there, described.name)
    cluster.check_resources(ray, wanted)
    created: list[str] = []
    try:
        for member in new:
            cluster.create(ray, member)
            created.append(member.actor_name)
        _until_ready(ray, [member.actor_name for member in wanted], time.monotonic() + ready_within_s)
    except BaseException:
        _end(ray, created)
        raise
    return connect(described.name, address=address)


def connect(name: str = "turnout", *, address: str = "auto") -> Deployment:
    """Find a deployment by its name. Raises DeploymentError if there is none, or a service does not serve now."""
    ray = cluster.join(address)
    statuses = status(name, address=address)
    states = {one.name: one.state for one in statuses if one.state is not None and one.state.target}
    away = [service for service in SERVICES if service not in states]
    if away:
        raise DeploymentError(f"deployment {name!r} does not serve now: {', '.join(away)}; see turnout ray status")
    (member,) = cluster.ask(ray, [cluster.find(ray, f"{name}/{SERVICES[0]}")], "member")
    if member is None:
        raise DeploymentError(f"the {SERVICES[0]} of deployment {name!r} does not answer")
    targets = {member_name: state.target for member_name, state in states.items()}
    services = {service: targets.pop(service) for service in SERVICES}
    return Deployment(name, member.run, **services, store=member.store or None, agents=targets)


def status(name: str = "turnout", *, address: str = "auto") -> list[MemberStatus]:
    """Return how every member is, services first. Raises DeploymentError if there is no such deployment."""
    ray = cluster.join(address)
    actor_names = cluster.names(ray, name)
    if not actor_names:
        raise DeploymentError(f"there is no deployment {name!r} in the cluster")
    return sorted(_statuses(ray, actor_names), key=_place)


def down(name: str = "turnout", *, address: str = "auto") -> list[str]:
    """End a deployment in order, agents first; data directories stay. Returns the names of what was ended.

    Raises DeploymentError if there is no such deployment.
    """
    ray = cluster.join(address)
    actor_names = cluster.names(ray, name)
    if not actor_names:
        raise DeploymentError(f"there is no deployment {name!r} in the cluster")
    services = [f"{name}/{service}" for service in SERVICES]
    _end(ray, [one for one in actor_names if one not in services])
    _end(ray, [one for one in services if one in actor_names])
    return [one.removeprefix(f"{name}/") for one in actor_names]


def _place(status: MemberStatus) -> tuple[int, str]:
    return (SERVICES.index(status.name) if status.name in SERVICES else len(SERVICES), status.name)


def _running(ray: Any, name: str) -> dict[str, Member | None]:
    """The members that have an actor, by name; None for one that does not answer, such as one without a node."""
    actor_names = cluster.names(ray, name)
    found = [(one, actor) for one in actor_names if (actor := cluster.find(ray, one)) is not None]
    answers = cluster.ask(ray, [actor for _, actor in found], "member")
    return {one.removeprefix(f"{name}/"): answer for (one, _), answer in zip(found, answers, strict=True)}


def _with_ports(wanted: Sequence[Member], there: dict[str, Member | None], rng: random.Random) -> list[Member]:
    ported = []
    taken = {member.port for member in (*wanted, *there.values()) if member is not None}
    for member in wanted:
        known = there.get(member.name)
        if not member.port and known is not None:
            # One that was chosen before.
            ported.append(with_port(member, rng, taken, known.port))
            continue
        ported.append(with_port(member, rng, taken))
        taken.add(ported[-1].port)
    return ported


def _new(wanted: Sequence[Member], there: dict[str, Member | None], name: str) -> list[Member]:
    """Which members have no actor yet. Raises DeploymentError if others run under the name."""
    names = {member.name for member in wanted}
    differ = [member.name for member in wanted if (known := there.get(member.name)) is not None and known != member]
    problems = [f"{one} runs already, described otherwise" for one in differ]
    problems += [f"{one} runs and is not described" for one in sorted(there.keys() - names)]
    if problems:
        raise DeploymentError(*problems, f"end it first: turnout ray down --name {name}")
    return [member for member in wanted if member.name not in there]


def _until_ready(ray: Any, actor_names: Sequence[str], until: float) -> None:
    while True:
        statuses = _statuses(ray, actor_names)
        waiting = [one for one in statuses if one.problem]
        if not waiting:
            return
        # A process that cannot start says why at once, and would say so for ever; but it may yet get a port or a
        # journal that a process before it still has.
        if time.monotonic() > until or any(_hopeless(one.state) for one in waiting):
            raise DeploymentError(*(f"{one.name}: {one.problem}" for one in waiting))
        time.sleep(_LOOK_EVERY_S)


_STARTS_TO_GIVE_UP: Final = 8
"""About 15 s of tries, more than the grace of a process that ends."""


def _hopeless(state: MemberState | None) -> bool:
    return state is not None and not state.target and state.starts > _STARTS_TO_GIVE_UP


def _statuses(ray: Any, actor_names: Sequence[str]) -> list[MemberStatus]:
    found = [(one, actor) for one in actor_names if (actor := cluster.find(ray, one)) is not None]
    states = cluster.ask(ray, [actor for _, actor in found], "state")
    answers = {one: state for (one, _), state in zip(found, states, strict=True)}
    return [MemberStatus(one.partition("/")[2], answers.get(one), _problem(answers.get(one))) for one in actor_names]


def _problem(state: MemberState | None) -> str:
    if state is None:
        return "its actor does not answer: it starts, or waits for a node that offers its resource"
    if not state.target:
        return f"does not serve{': ' if state.last_end else ''}{state.last_end}"
    if state.unregistered:
        why = state.registration or "not yet"
        return f"replicas not registered at the controller: {', '.join(state.unregistered)} ({why})"
    return ""


def _end(ray: Any, actor_names: Sequence[str]) -> None:
    actors = [actor for one in actor_names if (actor := cluster.find(ray, one)) is not None]
    cluster.ask(ray, actors, "stop", _STOP_WITHIN_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)
