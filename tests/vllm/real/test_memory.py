"""Sleep, wake and KV release of a real engine: what vLLM does by itself, and what is made of it."""

from __future__ import annotations

import asyncio

from services.engine.domain.spec import ALL_CACHES, KV_CACHE, WEIGHTS, PauseMode, Weights
from tests.vllm.real.engines import KV_BYTES, Engine, refused

BOTH = [WEIGHTS, KV_CACHE]


async def test_level_1_frees_the_memory_and_gives_back_the_same_output(engine: Engine) -> None:
    """The worker's process really shrinks by what its tags held."""
    before = await engine.generate()
    awake = (await engine.backend.probe()).memory_bytes
    await engine.backend.sleep(1, 30)
    state = await engine.backend.probe()
    assert (state.sleep_level, state.resident_tags, state.weights) == (1, frozenset(), Weights.INTACT)
    assert awake is not None
    assert state.memory_bytes is not None
    assert awake - state.memory_bytes >= 0.8 * KV_BYTES
    await engine.backend.wake_up(BOTH, 30)
    await engine.backend.resume(10)
    assert (await engine.generate()).tokens == before.tokens


async def test_h28_level_2_serves_only_after_a_load(engine: Engine) -> None:
    """vLLM itself wakes, schedules and answers garbage without an error."""
    before = await engine.generate()
    await engine.backend.sleep(2, 30)
    await engine.backend.wake_up(BOTH, 30)
    assert (await engine.backend.probe()).weights is Weights.DISCARDED
    assert await engine.raw.is_paused(), "the last tag starts vLLM's scheduling; it must not stay so"
    await refused(engine.backend.resume(10), "FAILED_PRECONDITION", "WEIGHTS_DISCARDED")
    assert (await engine.generate()).error is not None
    await engine.backend.collective_rpc("reload_weights", "", None, 60)
    await refused(engine.backend.resume(10), "FAILED_PRECONDITION", "CACHE_OLDER_THAN_WEIGHTS")
    await engine.backend.reset_caches(ALL_CACHES, True, True, 10)
    await engine.backend.resume(10)
    assert (await engine.generate()).tokens == before.tokens


async def test_vllm_answers_garbage_after_level_2(engine: Engine) -> None:
    """The hazard itself: should this fail one day, vLLM has become safer."""
    before = await engine.generate()
    await engine.surface.sleep(2, "abort")
    await engine.surface.wake_up(None)
    async for part in engine.surface.generate("garbage", (5, 6, 7), _greedy(20)):
        tokens = part.token_ids
    assert tokens != before.tokens


async def test_weights_wake_before_kv(engine: Engine) -> None:
    """A partial wake leaves scheduling stopped, and a request is refused by us."""
    await engine.backend.sleep(1, 30)
    asleep = (await engine.backend.probe()).memory_bytes
    await engine.backend.wake_up([WEIGHTS], 30)
    state = await engine.backend.probe()
    assert state.resident_tags == {WEIGHTS}
    assert state.paused
    assert state.memory_bytes is not None
    assert asleep is not None
    assert state.memory_bytes - asleep < 0.2 * KV_BYTES
    output = await engine.generate()
    assert output.error is not None
    assert output.error.reason == "TAG_ASLEEP"
    await refused(engine.backend.resume(10), "FAILED_PRECONDITION", "TAG_ASLEEP")


async def test_h27_tags_that_are_unknown_repeated_or_awake(engine: Engine) -> None:
    """One wrong tag voids vLLM's whole call without a word."""
    await engine.backend.sleep(1, 30)
    await refused(engine.backend.wake_up([WEIGHTS, "bogus"], 10), "INVALID_ARGUMENT", "UNKNOWN_TAG")
    await refused(engine.backend.wake_up(["Weights "], 10), "INVALID_ARGUMENT", "UNKNOWN_TAG")
    assert (await engine.backend.probe()).resident_tags == frozenset()
    await engine.surface.wake_up([WEIGHTS, "bogus"])
    assert (await engine.surface.read()).tagged_bytes == {WEIGHTS: 0, KV_CACHE: 0}
    await engine.backend.wake_up([WEIGHTS], 10)
    await asyncio.gather(*(engine.backend.wake_up(BOTH, 10) for _ in range(20)))
    state = await engine.backend.probe()
    assert state.resident_tags == {WEIGHTS, KV_CACHE}
    assert not state.paused


async def test_levels_are_judged_here(engine: Engine) -> None:
    """AsyncLLM takes 7, and -1 for 0."""
    for level in (-1, 0, 3, 7):
        await refused(engine.backend.sleep(level, 10), "INVALID_ARGUMENT", "INVALID_ARGUMENT")
    assert not await engine.raw.is_sleeping()
    await engine.backend.sleep(1, 30)
    await engine.backend.sleep(1, 30)
    await refused(engine.backend.sleep(2, 30), "FAILED_PRECONDITION", "ASLEEP_AT_OTHER_LEVEL")


async def test_kv_memory_is_released_alone(engine: Engine) -> None:
    """Natively, only when paused, and back."""
    before = await engine.generate()
    await refused(engine.backend.release_kv_cache(10), "FAILED_PRECONDITION", "NOT_PAUSED")
    await engine.backend.pause(PauseMode.ABORT, True, 10)
    paused = await engine.backend.probe()
    assert paused.resident_tags == {WEIGHTS, KV_CACHE}, "vLLM calls a mere pause sleeping"
    await engine.backend.release_kv_cache(10)
    released = await engine.backend.probe()
    assert released.resident_tags == {WEIGHTS}
    assert paused.memory_bytes is not None
    assert released.memory_bytes is not None
    assert paused.memory_bytes - released.memory_bytes >= 0.8 * KV_BYTES
    await refused(engine.backend.release_kv_cache(10), "FAILED_PRECONDITION", "TAG_ASLEEP")
    await engine.backend.resume_kv_cache(10)
    await engine.backend.resume(10)
    assert (await engine.generate()).tokens == before.tokens


async def test_a_sleep_with_only_kv_awake_frees_the_kv(engine: Engine) -> None:
    """vLLM takes an engine without weights for asleep already, says yes and frees nothing."""
    await engine.backend.sleep(1, 30)
    asleep = (await engine.backend.probe()).memory_bytes
    await engine.backend.wake_up([KV_CACHE], 30)
    await engine.surface.sleep(1, "abort")
    held = (await engine.surface.read()).tagged_bytes
    assert held is not None
    assert held[KV_CACHE] >= 0.9 * KV_BYTES
    await engine.backend.sleep(1, 30)
    again = (await engine.backend.probe()).memory_bytes
    assert again is not None
    assert asleep is not None
    assert abs(again - asleep) < 0.1 * KV_BYTES


async def test_h25_running_requests_keep_the_memory(engine: Engine) -> None:
    """A sleep is refused while anything runs; after a drain it is done."""
    running = await engine.begin()
    await refused(engine.backend.sleep(1, 10), "FAILED_PRECONDITION", "NOT_DRAINED")
    assert not (await engine.backend.probe()).paused
    await engine.backend.pause(PauseMode.ABORT, True, 10)
    output = await running
    assert output.error is None
    assert output.tokens
    await engine.backend.sleep(1, 30)
    assert (await engine.backend.probe()).running == 0


def _greedy(tokens: int):  # type: ignore[no-untyped-def]
    from services.engine.guarded.surface import Draw

    return Draw(tokens, 0.0, 1.0, 0, None, (), False)
