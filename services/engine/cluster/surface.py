"""An engine in a Ray actor, as a `Surface`.

Invariants: an actor that died is known at the next check, also while a call to it hangs; a stream that is closed early
ends its request in the engine; an actor that was started here is where it was told to be, or was not started.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from services.engine.cluster.actors import Actor, Cluster
from services.engine.cluster.host import STARTER, EngineHost, error_of
from services.engine.guarded import surface as calls
from services.engine.guarded.surface import Draw, Reading, Tokens
from services.runtime.errors import TurnoutError, failed_precondition, unavailable

CHECK_S: Final = 0.5
"""Wall seconds for a sign of life; an actor answers while its engine works."""

CONCURRENCY: Final = 4096
"""Calls and streams at work in an actor: a check must never wait behind requests."""

PLACE_S: Final = 60.0
"""Wall seconds in which Ray finds room for an actor on its node."""


@dataclass(frozen=True, slots=True)
class Placing:
    """How an actor is started. `node` is Ray's id of a node, empty for any; the rest is what Ray reserves for it."""

    configuration: str
    node: str = ""
    gpus: float = 0.0
    cpus: float = 1.0
    starter: str = STARTER


async def attach(cluster: Cluster, place: str, placing: Placing | None) -> RaySurface:
    """Find an actor, or start it if there is none and `placing` tells how.

    UNAVAILABLE / ENGINE_UNREACHABLE if there is none, FAILED_PRECONDITION / NOT_PLACED if its node has no room for it.
    """
    started = False
    try:
        actor = await cluster.find(place)
    except TurnoutError as error:
        if placing is None or error.reason != "ENGINE_UNREACHABLE":
            raise
        actor = await _start(cluster, place, placing)
        started = True
    try:
        surface = RaySurface(actor)
        await surface.find_out()
    except BaseException:
        if started:
            await _kill(cluster, actor)
        raise
    return surface


async def _start(cluster: Cluster, place: str, placing: Placing) -> Actor:
    ray = await cluster.join()
    from ray.exceptions import ActorUnschedulableError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    namespace, _, name = place.rpartition("/")
    options: dict[str, Any] = {
        "name": name,
        "get_if_exists": True,
        # It goes on without the controller, and is found again by it.
        "lifetime": "detached",
        "max_concurrency": CONCURRENCY,
        "num_gpus": placing.gpus,
        "num_cpus": placing.cpus,
    }
    if namespace:
        options["namespace"] = namespace
    if placing.node:
        alive = {node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}
        if placing.node not in alive:
            raise failed_precondition("NOT_PLACED", f"the cluster has no node {placing.node!r}", value=placing.node)
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(placing.node, soft=False)
    create = ray.remote(EngineHost).options(**options).remote
    actor = Actor(place, await asyncio.to_thread(create, placing.starter, placing.configuration))
    try:
        async with asyncio.timeout(PLACE_S):
            await actor.handle.__ray_ready__.remote()
    except (TimeoutError, ActorUnschedulableError):
        # Ray waits for room that other actors have, and gives up on a node that could never have it.
        await _kill(cluster, actor)
        raise failed_precondition("NOT_PLACED", f"Ray found no room for the actor {place}") from None
    except Exception as error:
        await _kill(cluster, actor)
        raise unavailable("ENGINE_NOT_STARTED", f"the actor {place} did not start: {str(error)[:300]}") from error
    return actor


async def _kill(cluster: Cluster, actor: Actor) -> None:
    ray = await cluster.join()
    with contextlib.suppress(Exception):
        await asyncio.to_thread(ray.kill, actor.handle)


class RaySurface:
    """One actor of the class `EngineHost`."""

    def __init__(self, actor: Actor) -> None:
        if not (actor.has("describe") and actor.has("generate")):
            raise failed_precondition("WRONG_ACTOR", f"the actor {actor.name} is none of this backend's")
        self.actor = actor
        self.offers: frozenset[str] = frozenset()
        self.vocabulary: int | None = None
        self.longest: int | None = None
        self.text_only = False
        self.incarnation = ""
        self.tags: frozenset[str] = frozenset()
        self.schedules_when_awake = True

    async def find_out(self) -> None:
        """Wait until the engine has started, and ask what it is."""
        facts, fault = await self.actor.call("describe")
        if fault is not None:
            raise error_of(fault)
        self.vocabulary, self.longest = facts["vocabulary"], facts["longest"]
        self.text_only, self.incarnation = facts["text_only"], facts["incarnation"]
        self.tags, self.schedules_when_awake = frozenset(facts["tags"]), facts["schedules_when_awake"]
        self.offers = frozenset(facts["offers"])
        if facts["host"] != socket.gethostname():
            # Bytes that arrive here would lie where its workers cannot read them.
            self.offers -= {calls.WEIGHT_FILES}

    async def _ask(self, method: str, *arguments: Any) -> Any:
        value, fault = await self.actor.call("call", method, arguments)
        if fault is not None:
            raise error_of(fault)
        return value

    async def check(self) -> None:
        try:
            async with asyncio.timeout(CHECK_S):
                await self._ask("check")
        except TimeoutError:
            # What hangs is not dead: the deadline of the call decides.
            return

    async def read(self, memory: bool = True) -> Reading:
        return cast(Reading, await self._ask("read", memory))

    async def unfinished(self) -> int:
        return int(await self._ask("unfinished"))

    async def sleep(self, level: int, mode: str) -> None:
        await self._ask("sleep", level, mode)

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        await self._ask("wake_up", None if tags is None else list(tags))

    async def release_kv_cache(self) -> None:
        await self._ask("release_kv_cache")

    async def pause(self, mode: str, clear_cache: bool) -> None:
        await self._ask("pause", mode, clear_cache)

    async def resume(self) -> None:
        await self._ask("resume")

    async def reset_prefix_cache(self, running: bool, connectors: bool) -> bool:
        return bool(await self._ask("reset_prefix_cache", running, connectors))

    async def reset_mm_cache(self) -> None:
        await self._ask("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._ask("reset_encoder_cache")

    async def collective_rpc(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return list(await self._ask("collective_rpc", method, list(args), dict(kwargs)))

    async def reload_weights(self, path: str) -> None:
        await self._ask("reload_weights", path)

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        await self._ask("init_transfer", dict(info))

    async def start_update(self) -> None:
        await self._ask("start_update")

    async def update_weights(self, info: Any) -> None:
        await self._ask("update_weights", info)

    async def finish_update(self) -> None:
        await self._ask("finish_update")

    async def set_version(self, version: str) -> None:
        await self._ask("set_version", version)

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        await self._ask("abort", None if request_ids is None else list(request_ids))

    async def generate(self, request_id: str, prompt: Sequence[int], draw: Draw) -> AsyncGenerator[Tokens, None]:
        ended = False
        stream = self.actor.stream("generate", request_id, list(prompt), draw)
        try:
            async for tokens, fault in stream:
                if fault is not None:
                    ended = True
                    raise error_of(fault)
                ended = tokens.finish is not None
                yield tokens
                if ended:
                    return
            raise unavailable("ENGINE_ENDED_STREAM", f"{self.actor.name} ended a stream without saying why")
        finally:
            await stream.aclose()
            if not ended:
                with contextlib.suppress(TurnoutError):
                    await self.abort([request_id])

    async def close(self) -> None:
        """Nothing: the actor goes on."""
