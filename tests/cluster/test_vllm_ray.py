"""The backend `vllm-ray` in a real Ray cluster, with a scripted engine in the actor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.backends import vllm_ray
from services.engine.backends.base import EngineRequest
from services.engine.cluster.actors import Cluster
from services.engine.cluster.surface import PLACE_S
from services.engine.domain.requests import Finish, Sampling
from services.engine.domain.spec import KV_CACHE, WEIGHTS, PauseMode, ReplicaSpec, Role
from services.engine.domain.tokens import Stretches
from services.engine.guarded.backend import GuardedBackend
from services.runtime.clock import MonotonicClock
from services.runtime.errors import TurnoutError
from tests.cluster.engines import BROKEN, STARTER

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

WAIT = 60.0


@contextlib.contextmanager
def refused(reason: str) -> Iterator[None]:
    with pytest.raises(TurnoutError) as caught:
        yield
    assert caught.value.reason == reason, caught.value


def config(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text("model: m\n")
    return path


async def opened(name: str, address: str, tmp_path: Path, starter: str = STARTER, **options: str) -> GuardedBackend:
    spec = ReplicaSpec("r", Role.HYBRID, "vllm-ray", name, options=options)
    return await vllm_ray.open_backend(spec, config(tmp_path), Cluster(address), MonotonicClock(), starter)


@contextlib.asynccontextmanager
async def started(name: str, address: str, tmp_path: Path, **options: str) -> AsyncIterator[GuardedBackend]:
    backend = await opened(name, address, tmp_path, start="true", **options)
    try:
        yield backend
    finally:
        await backend.close()
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(*reversed(name.split("/"))) if "/" in name else ray.get_actor(name))


def named() -> set[str]:
    return {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}


def request(max_tokens: int) -> EngineRequest:
    return EngineRequest("a", [1], Stretches(), max_tokens, Sampling(logprobs=True), delta_tokens=1)


async def rpc(backend: GuardedBackend, method: str, timeout: float = WAIT) -> Any:
    (shard,) = (await backend.collective_rpc(method, "", None, timeout)).shards
    return shard.result_json


async def test_an_actor_is_started_on_its_node_and_found_again(address: str, tmp_path: Path) -> None:
    node = ray.nodes()[0]["NodeID"]
    async with started("turnout/placed", address, tmp_path, node=node, num_cpus="1") as backend:
        state = await backend.probe()
        assert state.declared_tags == {WEIGHTS, KV_CACHE}
        assert {"sleep", "release_kv_cache", "pause_keep"} <= state.capabilities
        # Found by its name alone, and not started twice.
        again = await opened("turnout/placed", address, tmp_path)
        assert (await again.probe()).incarnation == state.incarnation
        await backend.close()
        assert (await again.probe()).incarnation == state.incarnation


async def test_what_cannot_be_had_is_refused_and_leaves_no_actor(address: str, tmp_path: Path) -> None:
    with refused("ENGINE_UNREACHABLE"):
        await opened("nobody", address, tmp_path)
    with refused("NOT_PLACED"):
        await opened("elsewhere", address, tmp_path, start="true", node="f" * 56)
    with refused("INVALID_ARGUMENT"):
        await opened("placed", address, tmp_path, node="x")
    with refused("INVALID_ARGUMENT"):
        await opened("placed", address, tmp_path, start="true", num_gpus="some")
    with refused("ENGINE_FAILED"):
        await opened("broken", address, tmp_path, BROKEN, start="true")
    async with asyncio.timeout(WAIT):
        while "broken" in named():  # noqa: ASYNC110 - Ray has no event
            await asyncio.sleep(0.1)


async def test_an_actor_without_room_is_given_up(address: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("services.engine.cluster.surface.PLACE_S", 2.0)
    assert PLACE_S > 2.0
    with refused("NOT_PLACED"):
        await opened("large", address, tmp_path, start="true", num_gpus="8")


async def test_a_node_that_could_never_hold_an_actor_is_named_as_such(address: str, tmp_path: Path) -> None:
    """Ray says at once that the actor cannot be scheduled, which is no failure of its engine."""
    node = ray.nodes()[0]["NodeID"]
    with refused("NOT_PLACED"):
        await opened("misplaced", address, tmp_path, start="true", node=node, num_gpus="8")


async def test_an_actor_of_another_kind_is_named(address: str, tmp_path: Path) -> None:
    class Other:
        def ping(self) -> None: ...

    other = ray.remote(Other).options(name="other", num_cpus=0).remote()
    with refused("WRONG_ACTOR"):
        await opened("other", address, tmp_path)
    ray.kill(other)


async def test_memory_and_requests_go_through_the_actor(address: str, tmp_path: Path) -> None:
    async with started("cycle", address, tmp_path) as backend:
        outputs = [output async for output in backend.generate(request(5))]
        assert [token for output in outputs for token in output.token_ids] == [0, 1, 2, 3, 4]
        assert outputs[-1].finish is Finish.LENGTH
        await backend.pause(PauseMode.ABORT, True, WAIT)
        await backend.sleep(2, WAIT)
        state = await backend.probe()
        assert (state.resident_tags, state.memory_bytes) == (frozenset(), 100)
        with refused("TAG_ASLEEP"):
            await backend.resume(WAIT)


async def test_a_stream_that_is_closed_ends_its_request(address: str, tmp_path: Path) -> None:
    async with started("closed", address, tmp_path) as backend:
        stream = backend.generate(request(1000))
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(WAIT):
            while "a" not in await rpc(backend, "aborted"):  # noqa: ASYNC110 - the engine has no event
                await asyncio.sleep(0.05)


async def test_a_call_that_hangs_ends_at_its_deadline_and_stops_nothing_else(address: str, tmp_path: Path) -> None:
    async with started("hanging", address, tmp_path) as backend:
        with refused("ENGINE_TIMEOUT"):
            await rpc(backend, "hang", 0.5)
        outputs = [output async for output in backend.generate(request(2))]
        assert outputs[-1].finish is Finish.LENGTH


async def test_the_death_of_an_actor_ends_calls_and_streams(address: str, tmp_path: Path) -> None:
    """Also a call that would hang for ever; tokens that came are given on first."""
    async with started("mortal", address, tmp_path) as backend:
        pid = int(await rpc(backend, "pid"))
        stream = backend.generate(request(100000))
        assert (await anext(stream)).token_ids
        hanging = asyncio.ensure_future(rpc(backend, "hang"))
        await asyncio.sleep(0.3)
        os.kill(pid, 9)
        killed = time.monotonic()
        with refused("ENGINE_DEAD"):
            await hanging
        took = time.monotonic() - killed
        with refused("ENGINE_DEAD"):
            async for _ in stream:
                pass
        with refused("ENGINE_DEAD"):
            await backend.probe()
        assert took < WAIT / 2
