"""The safety above vLLM, on an engine that fails, hangs, lies and dies on command."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.engine.domain.engine_state import NATIVE_RELEASE
from services.engine.domain.spec import ALL_CACHES, KV_CACHE, WEIGHTS, Cache, PauseMode, Weights
from services.engine.guarded import surface as calls
from services.engine.guarded.surface import Reading
from services.runtime.errors import TurnoutError
from tests.engine.guarded.fake import EVERYTHING, FakeSurface, backend_on

BOTH = [WEIGHTS, KV_CACHE]


@contextlib.contextmanager
def refused(code: str, reason: str):  # type: ignore[no-untyped-def]
    with pytest.raises(TurnoutError) as caught:
        yield
    assert (caught.value.code.name, caught.value.reason) == (code, reason), caught.value


async def test_an_engine_that_cannot_be_stopped_safely_is_refused() -> None:
    """vLLM 0.13 pauses without modes."""
    with refused("FAILED_PRECONDITION", "ENGINE_TOO_OLD"):
        backend_on(FakeSurface(EVERYTHING - {calls.PAUSE_MODE}))


async def test_capabilities_are_what_the_engine_offers() -> None:
    state = await backend_on(FakeSurface()).probe()
    assert {"sleep", "wake_tags", NATIVE_RELEASE, "weight_transfer", "weight_version", "memory"} <= state.capabilities
    bare = await backend_on(FakeSurface(frozenset({calls.PAUSE, calls.PAUSE_MODE}))).probe()
    assert bare.capabilities == {"pause_wait"}


async def test_a_sleep_that_frees_nothing_is_no_sleep() -> None:
    """An engine without sleep mode takes the call, goes through all states and keeps its memory."""
    surface = FakeSurface()
    surface.frees = False
    with refused("ABORTED", "MEMORY_NOT_FREED"):
        await backend_on(surface).sleep(1, 5)
    with refused("FAILED_PRECONDITION", "NOT_OFFERED"):
        await backend_on(FakeSurface(EVERYTHING - {calls.SLEEP})).sleep(1, 5)


async def test_a_failed_release_is_mended_by_a_wake() -> None:
    """vLLM counts the tag as asleep although the call failed."""
    surface = FakeSurface()
    backend = backend_on(surface)
    await backend.pause(PauseMode.ABORT, True, 5)
    surface.fail.add("release_kv_cache")
    with refused("ABORTED", "ENGINE_FAILED"):
        await backend.release_kv_cache(5)
    assert (await backend.probe()).resident_tags == {WEIGHTS}
    await backend.resume_kv_cache(5)
    await backend.resume(5)
    assert (await backend.probe()).resident_tags == {WEIGHTS, KV_CACHE}


async def test_a_reading_without_memory_settles_no_doubt() -> None:
    """A sleep failed halfway and the pause that follows asks for no memory: what is gone must still be found out."""
    surface = FakeSurface()
    backend = backend_on(surface)
    await backend.probe()
    surface.fail.add("sleep")
    with refused("ABORTED", "ENGINE_FAILED"):
        await backend.sleep(2, 5)
    surface.asleep, surface.paused = {KV_CACHE}, True
    await backend.pause(PauseMode.ABORT, True, 5)
    assert (await backend.probe()).resident_tags == {WEIGHTS}
    with refused("FAILED_PRECONDITION", "TAG_ASLEEP"):
        await backend.resume(5)


async def test_an_answer_that_was_lost_leaves_the_memory_in_doubt() -> None:
    """A broken connection was taken for a call that had never reached the engine, which slept on unseen."""
    surface = FakeSurface()
    backend = backend_on(surface)
    await backend.pause(PauseMode.ABORT, True, 5)
    await backend.probe()
    surface.cut.add("release_kv_cache")
    with refused("UNAVAILABLE", "ENGINE_UNREACHABLE"):
        await backend.release_kv_cache(5)
    assert (await backend.probe()).resident_tags == {WEIGHTS}
    with refused("FAILED_PRECONDITION", "TAG_ASLEEP"):
        await backend.resume(5)


async def test_a_wake_never_overtakes_a_sleep_that_was_given_up() -> None:
    """The sleep fires later all the same: a wake in between would be followed by freed memory, and a dead engine."""
    surface = FakeSurface()
    surface.hang["sleep"] = asyncio.Event()
    backend = backend_on(surface)
    with refused("DEADLINE_EXCEEDED", "ENGINE_TIMEOUT"):
        await backend.sleep(2, 0.05)
    with refused("DEADLINE_EXCEEDED", "ENGINE_UNRESPONSIVE"):
        await backend.probe()
    with refused("DEADLINE_EXCEEDED", "REPLICA_BUSY"):
        await backend.wake_up(BOTH, 0.05)
    waking = asyncio.create_task(backend.wake_up(BOTH, 5))
    await asyncio.sleep(0.05)
    surface.hang["sleep"].set()
    await waking
    assert surface.calls == ["sleep 2 abort", "wake_up all", "pause abort"]
    state = await backend.probe()
    assert (state.weights, state.paused) == (Weights.DISCARDED, True)


async def test_h38_a_death_ends_a_call_that_hangs() -> None:
    surface = FakeSurface()
    surface.hang["pause"] = asyncio.Event()
    backend = backend_on(surface)
    pausing = asyncio.create_task(backend.pause(PauseMode.ABORT, True, 60))
    await asyncio.sleep(0.05)
    surface.dead = True
    async with asyncio.timeout(5):
        with refused("UNAVAILABLE", "ENGINE_DEAD"):
            await pausing
    with refused("UNAVAILABLE", "ENGINE_DEAD"):
        await backend.probe()


async def test_a_call_that_is_cancelled_still_counts_as_under_way() -> None:
    surface = FakeSurface()
    surface.hang["sleep"] = asyncio.Event()
    backend = backend_on(surface)
    sleeping = asyncio.create_task(backend.sleep(1, 60))
    await asyncio.sleep(0.05)
    sleeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sleeping
    with refused("DEADLINE_EXCEEDED", "REPLICA_BUSY"):
        await backend.resume(0.05)
    surface.hang["sleep"].set()
    with refused("FAILED_PRECONDITION", "TAG_ASLEEP"):
        await backend.resume(5)
    assert (await backend.probe()).sleep_level == 1


async def test_a_probe_during_a_call_asks_the_engine_nothing() -> None:
    """It answers nothing until it is done, and a probe that waits makes the replica look hung."""
    surface = FakeSurface()
    surface.hang["sleep"] = asyncio.Event()
    backend = backend_on(surface)
    sleeping = asyncio.create_task(backend.sleep(1, 60))
    await asyncio.sleep(0.05)
    assert (await backend.probe()).resident_tags == {WEIGHTS, KV_CACHE}
    surface.hang["sleep"].set()
    await sleeping


async def test_requests_keep_memory_unless_they_are_kept_for_recomputing() -> None:
    surface = FakeSurface()
    backend = backend_on(surface)
    surface.queued = 1
    with refused("FAILED_PRECONDITION", "NOT_DRAINED"):
        await backend.sleep(1, 5)
    await backend.pause(PauseMode.KEEP, True, 5)
    await backend.sleep(1, 5)
    assert surface.calls == ["pause keep", "sleep 1 keep"]


async def test_a_wait_is_over_when_nothing_is_left() -> None:
    surface = FakeSurface()
    backend = backend_on(surface)
    surface.queued = 2
    pausing = asyncio.create_task(backend.pause(PauseMode.WAIT, True, 5))
    await asyncio.sleep(0.1)
    assert surface.calls == []
    surface.queued = 0
    await pausing
    assert surface.calls == ["pause abort"], "vLLM's own wait cannot be taken back"


async def test_h29_a_reset_is_done_only_if_the_engine_says_so() -> None:
    surface = FakeSurface()
    surface.reset_answers = [False]
    backend = backend_on(surface)
    with refused("FAILED_PRECONDITION", "CACHE_BUSY"):
        await backend.reset_caches(frozenset({Cache.PREFIX}), False, True, 5)
    await backend.reset_caches(ALL_CACHES, True, True, 5)
    assert surface.calls[1:] == ["reset_prefix_cache True True", "reset_mm_cache", "reset_encoder_cache"]


async def test_a_multimodal_engine_without_an_encoder_reset_is_never_called_reset() -> None:
    surface = FakeSurface(EVERYTHING - {calls.RESET_ENCODER})
    surface.text_only = False
    with refused("FAILED_PRECONDITION", "NOT_OFFERED"):
        await backend_on(surface).reset_caches(ALL_CACHES, True, True, 5)
    surface.text_only = True
    await backend_on(surface).reset_caches(ALL_CACHES, True, True, 5)


async def test_what_others_did_to_the_engine_is_seen() -> None:
    """Drift: paused, woken, given another version by somebody else."""
    surface = FakeSurface()
    backend = backend_on(surface)
    await backend.probe()
    surface.paused = True
    assert (await backend.probe()).paused
    surface.paused = False
    assert not (await backend.probe()).paused
    surface.version = "9"
    assert (await backend.probe()).weight_version == 9
    with refused("FAILED_PRECONDITION", "CACHE_OLDER_THAN_WEIGHTS"):
        await backend.resume(5)
    await backend.sleep(1, 5)
    surface.asleep, surface.paused = set(), False
    state = await backend.probe()
    assert state.resident_tags == {WEIGHTS, KV_CACHE}
    assert not state.paused


async def test_h33_a_single_shard_cannot_be_called() -> None:
    """vLLM calls all its workers or none; a call meant for one is not sent to all."""
    surface = FakeSurface()
    with refused("INVALID_ARGUMENT", "INVALID_ARGUMENT"):
        await backend_on(surface).collective_rpc("reload_weights", "", 1, 5)
    assert surface.calls == []


async def test_a_reading_that_a_call_overtook_is_dropped() -> None:
    """It tells of an engine that was still running; the pause is what happened last."""
    surface = FakeSurface()
    backend = backend_on(surface)
    asked, answer = asyncio.Event(), asyncio.Event()
    ask = surface.read

    async def late(memory: bool = True) -> Reading:
        reading = await ask()
        asked.set()
        await answer.wait()
        return reading

    surface.read = late  # type: ignore[method-assign]
    probing = asyncio.create_task(backend.probe())
    await asked.wait()
    surface.read = ask  # type: ignore[method-assign]
    await backend.pause(PauseMode.ABORT, True, 5)
    answer.set()
    assert (await probing).paused
