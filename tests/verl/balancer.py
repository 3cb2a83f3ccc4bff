"""verl's balancer and its server actors, as far as membership is concerned, with the rules of verl 0.9.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from services.engine.cluster.actors import Actor, Cluster
from services.runtime.errors import unavailable

CONTRACT: dict[str, Any] = json.loads((Path(__file__).parent / "contract-0.9.1.json").read_text())


class Balancer:
    """Loads by server, and the sticky sessions."""

    def __init__(self, *servers: str) -> None:
        self.loads = dict.fromkeys(servers, 0)
        self.sticky = {"request": "somewhere"}
        self.least = len(servers)

    def get_all_servers(self) -> list[str]:
        return list(self.loads)

    def add_servers(self, servers: dict[str, Any]) -> None:
        self.loads.update(dict.fromkeys(servers, 0))

    def remove_servers(self, server_ids: list[str]) -> None:
        for server_id in server_ids:
            self.loads.pop(server_id, None)
        self.least = min(self.least, len(self.loads))

    def clear_sticky_cache(self) -> dict[str, Any]:
        self.sticky.clear()
        return {"cleared_entries": 1, "server_loads": dict(self.loads)}


class Server:
    """A server actor."""

    def __init__(self, address: str, port: int) -> None:
        self.address = (address, port)

    def get_server_address(self) -> tuple[str, int]:
        return self.address


CLASSES = {Balancer: "GlobalRequestLoadBalancer", Server: "vLLMHttpServer"}


class FakeActor:
    """An actor in this process; every call must be one that verl's class takes."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        known = CONTRACT["classes"][CLASSES[type(self.handle)]]["methods"][method]
        assert len(args) <= len(known["parameters"])
        assert named.keys() <= set(known["parameters"])
        return getattr(self.handle, method)(*args, **named)


class FakeCluster:
    """Actors by name."""

    def __init__(self, **actors: Any) -> None:
        self.actors = actors

    async def find(self, place: str) -> Actor:
        if place not in self.actors:
            raise unavailable("ENGINE_UNREACHABLE", f"there is no Ray actor {place!r}")
        return cast(Actor, FakeActor(self.actors[place]))

    def as_cluster(self) -> Cluster:
        return cast(Cluster, self)
