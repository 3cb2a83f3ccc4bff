"""What is pushed to whoever routes requests without the controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.engine.domain.spec import Role, Route


@dataclass(frozen=True, slots=True)
class Member:
    """One replica that requests may be placed on. HELD: they must wait with the sink, and not reach the engine."""

    replica_id: str
    backend: str
    endpoint: str
    role: Role
    route: Route


@dataclass(frozen=True, slots=True)
class Membership:
    """All members at one moment, and the replicas that are none.

    `version` rises with every change within one incarnation of the controller. Whoever sees `sessions_cleared` rise
    forgets which session is on which replica.
    """

    run_id: str
    incarnation: str
    version: int
    sessions_cleared: int
    members: tuple[Member, ...]
    others: tuple[Member, ...]


class RouteSink(Protocol):
    """Something that routes requests by itself."""

    name: str
    """For logs and metrics."""
    holds: bool
    """Whether it can keep requests back for a replica that is HELD. Only such a one is told of HELD members."""

    async def push(self, membership: Membership) -> None:
        """Take over a membership, all of it: earlier ones may never have come. Raises a TurnoutError if it cannot."""
        ...

    async def close(self) -> None:
        """Let go of it; it stays as it is."""
        ...
