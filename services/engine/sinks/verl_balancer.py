"""verl's load balancer (`GlobalRequestLoadBalancer` of 0.9.1, or a router plugin with its calls), a Ray actor.

Invariants: only servers of replicas that are verl's own actors are touched, so what the trainer put there besides
stays; servers are added before others are removed, since requests fail while the balancer is empty; one that is there
is never added again, which would reset its load to 0. The balancer has no queue, so it cannot hold; a standalone server
that is HELD stays in it all the same, since verl's servers have a gate of their own.
"""

from __future__ import annotations

import contextlib
from typing import Final

from services.engine.cluster.actors import Actor, Cluster
from services.engine.domain.spec import Role, Route
from services.engine.sinks.base import Member, Membership
from services.runtime.errors import TurnoutError

BACKEND: Final = "verl-ray"


class VerlBalancer:
    """The balancer by the name of its actor, NAME or NAMESPACE/NAME."""

    holds = False

    def __init__(self, place: str, cluster: Cluster) -> None:
        self.name = place
        self._cluster = cluster
        self._balancer: Actor | None = None
        self._server_ids: dict[str, str] = {}
        self._cleared = 0

    async def push(self, membership: Membership) -> None:
        try:
            await self._take(membership)
        except TurnoutError:
            # Its actor may be another next time.
            self._balancer = None
            raise

    async def _take(self, membership: Membership) -> None:
        if self._balancer is None:
            self._balancer = await self._cluster.find(self.name)
        balancer = self._balancer
        there = set(await balancer.call("get_all_servers"))
        missing = {}
        for member in membership.members:
            if member.backend == BACKEND:
                server_id, actor = await self._server(member)
                if server_id not in there:
                    missing[server_id] = actor.handle
        for member in membership.others:
            if member.backend == BACKEND:
                await self._learn(member)
        # A standalone server that is paused for its weights lets requests wait at its own gate.
        waiting = [each for each in membership.others if each.role is Role.STANDALONE and each.route is Route.HELD]
        serving = {member.endpoint for member in (*membership.members, *waiting)}
        # One that was deregistered is in neither list.
        gone = {server_id for endpoint, server_id in self._server_ids.items() if endpoint not in serving}
        if missing:
            await balancer.call("add_servers", missing)
        leaving = sorted(there.intersection(gone))
        if leaving:
            await balancer.call("remove_servers", leaving)
        if membership.sessions_cleared > self._cleared:
            await balancer.call("clear_sticky_cache")
        self._cleared = membership.sessions_cleared

    async def _server(self, member: Member) -> tuple[str, Actor]:
        """Id and actor of a replica's server, as verl names it: address and port of its HTTP server."""
        actor = await self._cluster.find(member.endpoint)
        address, port = await actor.call("get_server_address")
        server_id = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._server_ids[member.endpoint] = server_id
        return server_id, actor

    async def _learn(self, member: Member) -> None:
        """Find out its id, if that is not known and it lives."""
        if member.endpoint not in self._server_ids:
            with contextlib.suppress(TurnoutError):
                await self._server(member)

    async def close(self) -> None:
        self._balancer = None
