"""The backend `sglang-http` on a server that dies of what SGLang's scheduler dies of, and knows its contract."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from services.engine.backends.base import EngineRequest
from services.engine.domain.engine_state import NATIVE_RELEASE
from services.engine.domain.requests import Finish, Sampling
from services.engine.domain.spec import ALL_CACHES, KV_CACHE, WEIGHTS, PauseMode, ReplicaSpec, Role, Weights
from services.engine.domain.tokens import Stretches
from services.engine.guarded.backend import GuardedBackend
from services.engine.guarded.surface import Draw
from services.engine.sglang.http import CUDA_GRAPH, SglangSurface, connect, wire_id
from services.engine.sglang.note import Note, read_note
from services.runtime.clock import MonotonicClock
from services.runtime.errors import TurnoutError
from tests.sglang.server import SglangServer, chunk

ALL = {WEIGHTS, KV_CACHE, CUDA_GRAPH}
DRAW = Draw(10, 1.0, 1.0, 0, 7, (), True)


@contextlib.contextmanager
def refused(reason: str) -> Iterator[None]:
    with pytest.raises(TurnoutError) as caught:
        yield
    assert caught.value.reason == reason, caught.value


async def surface_of(server: SglangServer) -> SglangSurface:
    surface = await connect("http://engine/", httpx.MockTransport(server))
    server.posted.clear()
    return surface


@asynccontextmanager
async def backend_of(server: SglangServer, weights_loaded: bool = True) -> AsyncIterator[GuardedBackend]:
    spec = ReplicaSpec("r", Role.HYBRID, "sglang-http", "http://engine", weights_loaded=weights_loaded)
    backend = GuardedBackend(spec, await surface_of(server), MonotonicClock())
    try:
        await backend.probe()
        yield backend
    finally:
        await backend.close()


async def empty() -> AsyncIterator[bytes]:
    for part in list[bytes]():
        yield part


async def test_finding_out_changes_nothing() -> None:
    """A GET of some of its routes would carry them out."""
    server = SglangServer()
    await connect("http://engine", httpx.MockTransport(server))
    assert server.posted == []


async def test_capabilities_are_what_the_server_offers() -> None:
    server = SglangServer()
    async with backend_of(server) as backend:
        state = await backend.probe()
    assert state.declared_tags == ALL
    assert {"sleep", "wake_tags", NATIVE_RELEASE, "weight_transfer", "weight_version"} <= state.capabilities
    assert "memory" not in state.capabilities
    server.info["enable_memory_saver"] = False
    async with backend_of(server) as backend:
        assert not {"sleep", "wake_tags", NATIVE_RELEASE} & (await backend.probe()).capabilities
        with refused("NOT_OFFERED"):
            await backend.sleep(2, 5)


@pytest.mark.parametrize("missing", ["/pause_generation", "/update_weight_version", "/abort_request"])
async def test_a_server_without_a_needed_route_is_refused(missing: str) -> None:
    server = SglangServer()
    server.missing = {missing}
    with refused("ENGINE_TOO_OLD"):
        await connect("http://engine", httpx.MockTransport(server))


async def test_a_lend_and_a_reclaim() -> None:
    """Paused, asleep, weights first, loaded, then the rest; never resumed while anything is missing."""
    server = SglangServer()
    server.running = 3
    async with backend_of(server) as backend:
        await backend.pause(PauseMode.ABORT, True, 5)
        await backend.sleep(2, 5)
        assert server.released == ALL
        with refused("TAG_ASLEEP"):
            await backend.resume(5)
        await backend.wake_up([WEIGHTS], 5)
        assert server.released == {KV_CACHE, CUDA_GRAPH}
        await backend.start_weight_update("u", 4, False, 5)
        info = '{"mover": "transfer", "init": {}, "update": {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]]}}'
        await backend.update_weights(0, info, empty(), 5)
        await backend.finish_weight_update("", 5)
        await backend.wake_up([KV_CACHE, CUDA_GRAPH], 5)
        state = await backend.probe()
        assert (state.paused, state.weights, state.weight_version) == (True, Weights.INTACT, 4)
        with refused("CACHE_OLDER_THAN_WEIGHTS"):
            await backend.resume(5)
        await backend.reset_caches(ALL_CACHES, False, False, 5)
        await backend.resume(5)
        assert not (await backend.probe()).paused
    assert (server.dead, server.paused, server.version) == (False, "", "4")


async def test_kv_memory_is_released_alone() -> None:
    server = SglangServer()
    async with backend_of(server) as backend:
        await backend.pause(PauseMode.KEEP, True, 5)
        await backend.release_kv_cache(5)
        assert server.released == {KV_CACHE}
        await backend.resume_kv_cache(5)
        assert (await backend.probe()).paused
        await backend.resume(5)
    assert not server.released
    assert not server.dead


async def test_kept_requests_are_recomputed() -> None:
    """In place they would keep their blocks, and go on over new weights with keys and values of the old ones."""
    server = SglangServer()
    server.running = 2
    async with backend_of(server) as backend:
        await backend.pause(PauseMode.KEEP, True, 5)
        assert server.paused == "retract"
        await backend.sleep(2, 5)
        assert (await backend.probe()).running == 2
    assert server.released == ALL
    assert not server.dead


async def test_nothing_is_released_twice_or_resumed_twice() -> None:
    server = SglangServer()
    async with backend_of(server) as backend:
        await backend.pause(PauseMode.ABORT, False, 5)
        await backend.release_kv_cache(5)
        await backend.sleep(2, 5)
        await backend.sleep(2, 5)
        await backend.wake_up([WEIGHTS], 5)
        await backend.wake_up([WEIGHTS], 5)
        await backend.sleep(2, 5)
    assert not server.dead
    assert server.released == ALL


async def test_a_server_that_does_not_come_to_rest_is_not_released() -> None:
    """A release would kill its scheduler."""
    server = SglangServer()
    surface = await surface_of(server)
    await surface.pause("abort", False)
    server.running = 1
    with refused("NOT_DRAINED"):
        await surface.sleep(2, "abort")
    assert "/release_memory_occupation" not in server.calls
    assert not server.dead
    await surface.close()


async def test_level_1_needs_a_server_that_keeps_weights() -> None:
    server = SglangServer()
    async with backend_of(server) as backend:
        await backend.pause(PauseMode.ABORT, False, 5)
        with refused("NOT_OFFERED"):
            await backend.sleep(1, 5)
    server.info["enable_weights_cpu_backup"] = True
    async with backend_of(server) as backend:
        await backend.sleep(1, 5)
        await backend.wake_up(sorted(ALL), 5)
        await backend.resume(5)
    assert not server.dead


async def test_another_controller_finds_out_what_is_asleep() -> None:
    """SGLang does not tell, and would die of being told to release it again."""
    server = SglangServer()
    async with backend_of(server) as backend:
        await backend.pause(PauseMode.ABORT, True, 5)
        await backend.sleep(2, 5)
        await backend.wake_up([WEIGHTS], 5)
    async with backend_of(server) as backend:
        state = await backend.probe()
        assert state.resident_tags == {WEIGHTS}
        assert (state.paused, state.weights) == (True, Weights.DISCARDED)
        await backend.sleep(2, 5)
        await backend.wake_up(sorted(ALL), 5)
        with refused("WEIGHTS_DISCARDED"):
            await backend.resume(5)
    assert not server.dead


async def test_a_change_that_failed_leaves_an_engine_to_be_started_again() -> None:
    server = SglangServer()
    async with backend_of(server) as backend:
        await backend.pause(PauseMode.ABORT, True, 5)
        server.fail.add("/release_memory_occupation")
        with refused("ENGINE_FAILED"):
            await backend.sleep(2, 5)
        with refused("ENGINE_DEAD"):
            await backend.probe()
    with refused("ENGINE_STATE_UNKNOWN"):
        await connect("http://engine", httpx.MockTransport(server))


async def test_a_wake_that_nobody_saw_end_is_never_taken_for_sleep() -> None:
    """Its next controller would skip the sleep of an engine that is noted asleep, and the wake be carried out later."""
    server = SglangServer()
    async with backend_of(server) as backend:
        await backend.pause(PauseMode.ABORT, True, 5)
        await backend.sleep(2, 5)
        server.holding["/resume_memory_occupation"] = late = asyncio.Event()
        with refused("ENGINE_TIMEOUT"):
            await backend.wake_up(sorted(ALL), 0.05)
        with refused("REPLICA_BUSY"):
            await backend.sleep(2, 0.05)
    with refused("ENGINE_STATE_UNKNOWN"):
        await connect("http://engine", httpx.MockTransport(server))
    late.set()
    await server.carried_out.wait()
    assert not server.released


async def test_a_restart_is_seen() -> None:
    server = SglangServer()
    async with backend_of(server) as backend:
        await backend.start_weight_update("u", 4, False, 5)
        await backend.update_weights(0, '{"mover": "reload", "path": "/w"}', empty(), 5)
        await backend.finish_weight_update("", 5)
        assert (await backend.probe()).weight_version == 4
        server.version = "default"
        with refused("ENGINE_DEAD"):
            await backend.probe()


async def test_weights_that_a_trainer_moved_by_itself_make_caches_old() -> None:
    server = SglangServer()
    async with backend_of(server) as backend:
        await backend.pause(PauseMode.ABORT, True, 5)
        server.version = "9"
        state = await backend.probe()
        assert (state.weight_version, state.paused) == (9, True)
        with refused("CACHE_OLDER_THAN_WEIGHTS"):
            await backend.resume(5)
    assert server.version == "9 paused"


async def test_a_failed_move_leaves_half_updated_weights_and_no_session() -> None:
    server = SglangServer()
    async with backend_of(server) as backend:
        await backend.start_weight_update("u", 4, False, 5)
        server.fail.add("/update_weights_from_tensor")
        info = '{"mover": "transfer", "update": {"from": "tensor", "serialized_named_tensors": ["x"]}}'
        with refused("ENGINE_FAILED"):
            await backend.update_weights(0, info, empty(), 5)
        assert (await backend.probe()).weights is Weights.HALF_UPDATED
    assert not server.in_session
    assert server.calls[-1] == "/end_weight_update"


async def test_bytes_cannot_be_moved() -> None:
    async with backend_of(SglangServer()) as backend:
        await backend.start_weight_update("u", 4, False, 5)
        with refused("NOT_OFFERED"):
            await backend.update_weights(3, "", empty(), 5)


@pytest.mark.parametrize("increments", [False, True])
async def test_tokens_come_once_however_the_server_streams(increments: bool) -> None:
    server = SglangServer()
    ids = [[5], [6, 7], [8]] if increments else [[5], [5, 6, 7], [5, 6, 7, 8]]
    server.chunks = [chunk(ids[0], 1), chunk(ids[1], 3), chunk(ids[2], 4, "length")]
    surface = await surface_of(server)
    got = [tokens async for tokens in surface.generate("a", [1, 2], DRAW)]
    assert [token for tokens in got for token in tokens.token_ids] == [5, 6, 7, 8]
    assert [value for tokens in got for value in tokens.logprobs] == [-5.0, -6.0, -7.0, -8.0]
    assert got[-1].finish is Finish.LENGTH
    await surface.close()


async def test_an_aborted_request_keeps_its_tokens() -> None:
    server = SglangServer()
    server.chunks = [chunk([5], 1, logprobs=False), chunk([5], 1, "abort", logprobs=False)]
    request = EngineRequest("a", [1], Stretches(), 10, Sampling())
    async with backend_of(server) as backend:
        got = [output async for output in backend.generate(request)]
    assert [token for output in got for token in output.token_ids] == [5]
    assert got[-1].finish is Finish.ABORT


@pytest.mark.parametrize(("code", "reason"), [(400, "ENGINE_REFUSED"), (500, "ENGINE_FAILED")])
async def test_an_error_in_a_stream_is_no_output(code: int, reason: str) -> None:
    server = SglangServer()
    server.chunks = [{"error": {"message": "because", "code": code}}]
    surface = await surface_of(server)
    with refused(reason):
        async for _ in surface.generate("a", [1], DRAW):
            pass
    await surface.close()


async def test_an_abort_ends_no_other_request() -> None:
    """SGLang aborts all requests whose id begins with the one it is given."""
    server = SglangServer()
    surface = await surface_of(server)
    await surface.abort(["r-1"])
    await surface.abort(None)
    assert [body for _, body in server.posted] == [{"rid": wire_id("r-1")}, {"abort_all": True}]
    ids = ["", "1", "r", "r-1", "r-10", "3-r-1", "r-1000000000"]
    assert not [(a, b) for a in ids for b in ids if a != b and wire_id(b).startswith(wire_id(a))]
    await surface.close()


async def test_a_dead_server_is_dead() -> None:
    server = SglangServer()
    async with backend_of(server) as backend:
        server.dead = True
        with refused("ENGINE_DEAD"):
            await backend.pause(PauseMode.ABORT, False, 5)


async def test_a_multimodal_server_cannot_empty_its_encoder_cache() -> None:
    server = SglangServer()
    server.model["has_image_understanding"] = True
    async with backend_of(server) as backend:
        with refused("NOT_OFFERED"):
            await backend.reset_caches(ALL_CACHES, False, False, 5)


@pytest.mark.parametrize(
    "note",
    [
        Note("7"),
        Note("default"),
        Note("", paused=True),
        Note("7", paused=True, asleep=frozenset({"kv_cache", "weights"}), level=2),
        Note("7", changing=True),
    ],
)
def test_a_note_is_read_as_it_was_written(note: Note) -> None:
    assert read_note(note.write()) == note


@pytest.mark.parametrize("text", ["", "v1", "step 7 of run", "7 paused=yes", "7 level=two"])
def test_a_text_of_others_is_a_version(text: str) -> None:
    assert read_note(text) == Note(text)
