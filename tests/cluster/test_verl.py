"""verl's server actors and balancer in a real Ray cluster: the classes are stand-ins with verl's rules."""

from __future__ import annotations

import pytest

from services.engine.backends import verl_ray
from services.engine.cluster.actors import Cluster
from services.engine.domain.spec import KV_CACHE, WEIGHTS, PauseMode, ReplicaSpec, Role, Route
from services.engine.sinks.base import Member, Membership
from services.engine.sinks.verl_balancer import VerlBalancer
from services.runtime.clock import MonotonicClock
from services.runtime.errors import TurnoutError
from tests.verl.balancer import Balancer
from tests.verl.server import NewEngine, VerlServer

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")


async def test_a_server_is_looked_at_and_driven_where_it_lives(address: str) -> None:
    """What looks into it travels by value, so its process needs nothing of ours; its note is found by the next."""
    server = ray.remote(VerlServer).options(name="vllm_server_0_0", num_cpus=0).remote()
    spec = ReplicaSpec("r", Role.HYBRID, "verl-ray", "vllm_server_0_0")
    backend = await verl_ray.open_backend(spec, Cluster(address), MonotonicClock())
    await backend.pause(PauseMode.ABORT, True, 30)
    await backend.sleep(2, 30)
    await backend.wake_up([WEIGHTS], 30)
    again = await verl_ray.open_backend(spec, Cluster(address), MonotonicClock())
    state = await again.probe()
    assert state.declared_tags - state.resident_tags == {KV_CACHE}
    assert state.paused
    ray.kill(server)
    with pytest.raises(TurnoutError) as caught:
        await backend.wake_up([KV_CACHE], 30)
    assert caught.value.reason == "ENGINE_DEAD"


async def test_a_vllm_that_does_not_fit_is_named(address: str) -> None:
    server = ray.remote(VerlServer).options(name="vllm_server_1_0", num_cpus=0).remote(engine=NewEngine())
    with pytest.raises(TurnoutError) as caught:
        await verl_ray.open_backend(
            ReplicaSpec("r", Role.HYBRID, "verl-ray", "vllm_server_1_0"), Cluster(address), MonotonicClock()
        )
    assert caught.value.reason == "VERL_VLLM_MISMATCH"
    ray.kill(server)


async def test_the_balancer_follows_the_routes(address: str) -> None:
    """Named as the docs tell."""
    server = ray.remote(VerlServer).options(name="vllm_server_2_0", num_cpus=0).remote()
    balancer = ray.remote(name="turnout-balancer", num_cpus=0)(Balancer).remote("9.9.9.9:9")
    sink = VerlBalancer("turnout-balancer", Cluster(address))
    member = Member("h", "verl-ray", "vllm_server_2_0", Role.HYBRID, Route.SERVING)
    await sink.push(Membership("run", "i", 1, 0, (member,), ()))
    assert await balancer.get_all_servers.remote() == ["9.9.9.9:9", "10.0.0.1:80"]
    await sink.push(Membership("run", "i", 2, 0, (), (member,)))
    assert await balancer.get_all_servers.remote() == ["9.9.9.9:9"]
    for actor in (server, balancer):
        ray.kill(actor)
