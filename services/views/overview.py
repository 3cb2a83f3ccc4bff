"""What `turnout status` shows: services, runs and replicas, as plain data and as tables.

Invariants: what could not be asked is shown as not known, never as zero; the JSON form and the tables hold the same.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(slots=True)
class ServiceOverview:
    """One service at one target."""

    service: str
    target: str
    problem: str = ""
    """Why it could not be asked; empty if it answered."""


@dataclass(slots=True)
class ReplicaOverview:
    """One replica."""

    replica_id: str
    role: str
    route: str
    health: str
    running: int
    weight_version: int | None


@dataclass(slots=True)
class RunOverview:
    """One run, as far as the services know it."""

    run_id: str
    open: bool | None = None
    mode: str | None = None
    step: int | None = None
    policy: str | None = None
    switching: bool | None = None
    lends: int | None = None
    reclaims: int | None = None
    lease_s: float | None = None
    stuck_reason: str = ""
    sampleable: int | None = None
    in_flight: int | None = None
    replicas: list[ReplicaOverview] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be asked about it."""


@dataclass(slots=True)
class Overview:
    """Everything."""

    services: list[ServiceOverview] = field(default_factory=list)
    runs: list[RunOverview] = field(default_factory=list)

    @property
    def reachable(self) -> bool:
        """Whether every service answered."""
        return not any(service.problem for service in self.services)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return dataclasses.asdict(self)


def overview_table(overview: Overview) -> RenderableType:
    """Return it for a terminal."""
    parts: list[RenderableType] = [_services(overview.services)]
    if overview.runs:
        parts.append(_runs(overview.runs))
    elif overview.reachable:
        parts.append(Text("no runs", style="dim"))
    for run in overview.runs:
        if run.replicas:
            parts.append(_replicas(run))
        parts += [Text(f"{run.run_id}: {problem}", style="red") for problem in run.problems]
        if run.stuck_reason:
            parts.append(Text(f"{run.run_id} is stuck: {run.stuck_reason}", style="red"))
    return Group(*parts)


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...] = ()) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False)
    for word in words:
        table.add_column(word)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _services(services: list[ServiceOverview]) -> Table:
    table = _table("services", ("service", "target", "state"))
    for service in services:
        state = Text(service.problem, style="red") if service.problem else Text("serving", style="green")
        table.add_row(service.service, Text(service.target), state)
    return table


def _runs(runs: list[RunOverview]) -> Table:
    table = _table("runs", ("run", "mode", "policy"), ("step", "sampleable", "in flight", "lends", "reclaims", "lease"))
    for run in runs:
        mode = _known(run.mode) if run.open is not False else "closed"
        policy = _known(run.policy) if run.switching is not False else f"{_known(run.policy)} (switching off)"
        lease = "-" if run.lease_s is None else f"{run.lease_s:.0f} s"
        counts = (run.step, run.sampleable, run.in_flight, run.lends, run.reclaims)
        table.add_row(Text(run.run_id), mode, Text(policy), *map(_known, counts), lease)
    return table


def _replicas(run: RunOverview) -> Table:
    table = _table(f"replicas of {run.run_id}", ("replica", "role", "route", "health"), ("running", "weights"))
    for replica in run.replicas:
        table.add_row(
            Text(replica.replica_id),
            replica.role,
            replica.route,
            replica.health,
            str(replica.running),
            _known(replica.weight_version),
        )
    return table


def _known(value: object) -> str:
    return "-" if value is None else str(value)
