"""Membership in verl's balancer."""

from __future__ import annotations

import pytest

from services.engine.domain.spec import Role, Route
from services.engine.sinks.base import Member, Membership
from services.engine.sinks.verl_balancer import VerlBalancer
from services.runtime.errors import TurnoutError
from tests.verl.balancer import Balancer, FakeCluster, Server


def member(name: str, route: Route = Route.SERVING, backend: str = "verl-ray") -> Member:
    return Member(name, backend, name, Role.HYBRID, route)


def membership(members: list[Member], others: list[Member], cleared: int = 0) -> Membership:
    return Membership("run", "i", 1, cleared, tuple(members), tuple(others))


def setting() -> tuple[VerlBalancer, Balancer, FakeCluster]:
    balancer = Balancer("10.0.0.1:80", "[fe80::1]:81", "9.9.9.9:9")
    cluster = FakeCluster(balancer=balancer, h=Server("10.0.0.1", 80), s=Server("fe80::1", 81))
    return VerlBalancer("balancer", cluster.as_cluster()), balancer, cluster


async def test_servers_follow_the_routes() -> None:
    """And those of others stay, as does the load of one that is there already."""
    sink, balancer, _ = setting()
    balancer.loads["[fe80::1]:81"] = 5
    await sink.push(membership([member("s")], [member("h", Route.OUT)]))
    assert balancer.loads == {"[fe80::1]:81": 5, "9.9.9.9:9": 0}
    await sink.push(membership([member("s"), member("h")], []))
    assert balancer.loads == {"[fe80::1]:81": 5, "9.9.9.9:9": 0, "10.0.0.1:80": 0}


async def test_sessions_are_cleared_once_for_each_time() -> None:
    sink, balancer, _ = setting()
    await sink.push(membership([member("s")], []))
    assert balancer.sticky
    await sink.push(membership([member("s")], [], cleared=1))
    assert not balancer.sticky
    balancer.sticky["request"] = "s"
    await sink.push(membership([member("s")], [], cleared=1))
    assert balancer.sticky


async def test_the_balancer_is_never_empty_while_servers_change() -> None:
    """verl fails requests then."""
    sink, balancer, _ = setting()
    del balancer.loads["9.9.9.9:9"]
    await sink.push(membership([member("h")], [member("s", Route.OUT)]))
    await sink.push(membership([member("s")], [member("h", Route.OUT)]))
    assert balancer.least > 0


async def test_a_standalone_server_stays_while_its_weights_move() -> None:
    """It lets requests wait by itself; without it the balancer would be empty at every step's end, and fail them."""
    sink, balancer, _ = setting()
    await sink.push(membership([member("s")], [member("h", Route.OUT)]))
    held = Member("s", "verl-ray", "s", Role.STANDALONE, Route.HELD)
    await sink.push(membership([], [held, member("h", Route.HELD)]))
    assert balancer.get_all_servers() == ["[fe80::1]:81", "9.9.9.9:9"]


async def test_a_replica_that_was_deregistered_or_died_leaves() -> None:
    sink, balancer, cluster = setting()
    await sink.push(membership([member("s"), member("h")], []))
    del cluster.actors["h"], cluster.actors["s"]
    await sink.push(membership([], [member("s", Route.OUT)]))
    assert balancer.get_all_servers() == ["9.9.9.9:9"]


async def test_replicas_that_are_not_verls_are_not_its_business() -> None:
    sink, balancer, _ = setting()
    await sink.push(membership([member("http://x", backend="vllm-http")], []))
    assert len(balancer.loads) == 3


async def test_a_balancer_that_is_away_is_found_again() -> None:
    sink, _, cluster = setting()
    gone = cluster.actors.pop("balancer")
    with pytest.raises(TurnoutError, match="no Ray actor"):
        await sink.push(membership([member("s")], []))
    cluster.actors["balancer"] = gone
    await sink.push(membership([member("s")], []))
    assert not sink.holds
