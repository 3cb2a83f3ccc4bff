"""The reference engine: real memory, honest streams, and the hazards that a controller has to know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence

import google_crc32c
import pytest

from services.engine.backends.base import EngineRequest
from services.engine.domain.requests import Finish, Sampling
from services.engine.domain.spec import ALL_CACHES, KV_CACHE, WEIGHTS, Cache, PauseMode, ReplicaSpec, Role, Weights
from services.engine.domain.tokens import Stretches
from services.engine.reference.engine import EngineConfig, ReferenceEngine
from services.runtime.clock import ManualClock
from services.runtime.errors import TurnoutError

CONFIG = EngineConfig(weights_bytes=4096, kv_bytes=8192)
T = 1.0


class Reader:
    """Reads one output in the background."""

    def __init__(self, engine: ReferenceEngine, request_id: str, output: Sequence[int] = (), **fields: int) -> None:
        given = {"max_tokens": 1000, "delta_tokens": 0, **fields}
        seed = given.pop("seed", 1)
        request = EngineRequest(
            request_id,
            [1, 2, 3],
            Stretches([output]),
            given["max_tokens"],
            Sampling(seed=seed, logprobs=True),
            None,
            given["delta_tokens"],
        )
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Finish | None = None
        self.versions: list[int | None] = []
        self.outputs = 0
        self.task = asyncio.create_task(self._read(engine, request))

    async def _read(self, engine: ReferenceEngine, request: EngineRequest) -> None:
        async for output in engine.generate(request):
            self.outputs += 1
            self.tokens += output.token_ids
            self.logprobs += output.logprobs
            self.versions += [output.weight_version] * len(output.token_ids)
            self.finish = output.finish


def made(clock: ManualClock, config: EngineConfig = CONFIG, **fields: int | bool) -> ReferenceEngine:
    """An engine."""
    return ReferenceEngine(ReplicaSpec("r", Role.HYBRID, "reference", **fields), config, clock)  # type: ignore[arg-type]


async def chunks(weights: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    """Weights on their way."""
    for start in range(0, len(weights), size):
        yield weights[start : start + size]


async def load(engine: ReferenceEngine, version: int, weights: bytes = b"w" * 2000, checksum: str = "") -> None:
    """A whole update."""
    await engine.start_weight_update(f"u{version}", version, adapter=False, timeout=T)
    await engine.update_weights(len(weights), "", chunks(weights), T)
    await engine.finish_weight_update(checksum, T)


def dies(caught: pytest.ExceptionInfo[TurnoutError]) -> bool:
    """Whether a call killed the engine."""
    return caught.value.reason == "ENGINE_DEAD"


async def test_sleep_gives_memory_back_and_a_wake_fills_it_again() -> None:
    """A sleep that frees nothing would let a test pass that production fails."""
    engine = made(ManualClock())
    assert (await engine.probe()).memory_bytes == 4096 + 8192
    await engine.sleep(1, T)
    assert (await engine.probe()).memory_bytes == 0
    await engine.wake_up([WEIGHTS], T)
    assert (await engine.probe()).memory_bytes == 4096
    await engine.wake_up([WEIGHTS, KV_CACHE], T)
    state = await engine.probe()
    assert (state.memory_bytes, state.sleep_level, state.paused) == (4096 + 8192, 0, False)


async def test_level_one_keeps_the_weights_and_level_two_does_not() -> None:
    """The checksum of the real bytes tells."""
    engine = made(ManualClock())
    await load(engine, 1)
    before = await engine.collective_rpc("weight_checksum", "", None, T)
    assert json.loads(before.shards[0].result_json) == f"{google_crc32c.value(b'w' * 2000):08x}"
    await engine.sleep(1, T)
    await engine.wake_up([WEIGHTS, KV_CACHE], T)
    assert await engine.collective_rpc("weight_checksum", "", None, T) == before
    await engine.sleep(2, T)
    await engine.wake_up([WEIGHTS, KV_CACHE], T)
    assert await engine.collective_rpc("weight_checksum", "", None, T) != before
    assert (await engine.probe()).weights is Weights.DISCARDED


async def test_sleeping_deeper_from_half_awake_frees_the_rest() -> None:
    """An aborted lend leaves weights awake and KV asleep."""
    engine = made(ManualClock())
    await engine.sleep(1, T)
    await engine.wake_up([WEIGHTS], T)
    await engine.sleep(2, T)
    assert (await engine.probe()).memory_bytes == 0


@pytest.mark.parametrize("loaded", [True, False])
async def test_without_weights_it_answers_with_garbage_and_no_error(loaded: bool) -> None:
    """As a real engine does."""
    clock = ManualClock()
    right, other = made(clock), made(clock, weights_loaded=loaded)
    readers = [Reader(right, "a", max_tokens=50), Reader(other, "a", max_tokens=50)]
    await clock.advance(10)
    assert (readers[0].tokens == readers[1].tokens) == loaded
    assert readers[1].finish is Finish.LENGTH


async def test_an_aborted_output_continues_token_for_token() -> None:
    """Whatever interrupts it, the whole is the same."""
    clock = ManualClock()
    engine = made(clock)
    whole = Reader(engine, "whole", max_tokens=800)
    await clock.advance(100)
    part = Reader(engine, "part", max_tokens=800)
    await clock.advance(3)
    await engine.abort(["part", "unknown"])
    await part.task
    assert part.finish is Finish.ABORT
    assert 0 < len(part.tokens) < 800
    assert part.versions == [0] * len(part.tokens)
    rest = Reader(engine, "rest", part.tokens, max_tokens=800)
    await clock.advance(100)
    assert part.tokens + rest.tokens == whole.tokens
    assert part.logprobs + rest.logprobs == whole.logprobs
    assert rest.finish is Finish.LENGTH


async def test_nothing_is_left_to_say() -> None:
    """A request that has its whole output ends at once."""
    clock = ManualClock()
    engine = made(clock)
    whole = Reader(engine, "whole", max_tokens=5)
    await clock.advance(1)
    rest = Reader(engine, "rest", whole.tokens, max_tokens=5)
    await clock.advance(0)
    assert (rest.tokens, rest.finish) == ([], Finish.LENGTH)


async def test_deltas_and_final_only_say_the_same() -> None:
    """Streaming must not change the output."""
    clock = ManualClock()
    engine = made(clock)
    readers = [Reader(engine, str(n), max_tokens=300, delta_tokens=n) for n in (0, 64)]
    await clock.advance(100)
    assert readers[0].tokens == readers[1].tokens
    assert (readers[0].outputs, readers[1].outputs) == (1, 5)


async def test_pause_modes() -> None:
    """ABORT ends, KEEP freezes, WAIT waits; new requests are held in each."""
    clock = ManualClock()
    engine = made(clock)
    kept = Reader(engine, "kept", max_tokens=500)
    await clock.advance(1)
    await engine.pause(PauseMode.KEEP, True, T)
    held = Reader(engine, "held", max_tokens=10)
    await clock.advance(100)
    progress = await engine.progress()
    assert (kept.finish, held.finish, progress.waiting) == (None, None, 2)
    assert 0 < progress.output_tokens["kept"] < 500
    await engine.resume(T)
    await clock.advance(1)
    assert held.finish is Finish.LENGTH
    waiting = asyncio.create_task(engine.pause(PauseMode.WAIT, True, T))
    await clock.advance(1)
    late = Reader(engine, "late", max_tokens=10)
    assert not waiting.done()
    await clock.advance(100)
    assert (waiting.done(), kept.finish, late.finish) == (True, Finish.LENGTH, None)
    await engine.pause(PauseMode.ABORT, True, T)
    await late.task
    assert (late.finish, late.tokens) == (Finish.ABORT, [])


async def test_cleared_kept_requests_are_prefilled_again() -> None:
    """KEEP with a cleared cache costs a prefill of everything so far."""
    clock = ManualClock()
    engine = made(clock)
    Reader(engine, "a", max_tokens=500)
    await clock.advance(2)
    before = (await engine.progress()).prefilled_tokens
    await engine.pause(PauseMode.KEEP, True, T)
    await engine.resume(T)
    await clock.advance(1)
    assert (await engine.progress()).prefilled_tokens > before + 100


async def test_no_output_mixes_two_weight_versions() -> None:
    """A trainer has to know which version made which token."""
    clock = ManualClock()
    engine = made(clock)
    reader = Reader(engine, "a", max_tokens=500)
    await clock.advance(2)
    await engine.pause(PauseMode.KEEP, True, T)
    await load(engine, 8)
    await engine.resume(T)
    await clock.advance(100)
    assert reader.versions == sorted(reader.versions, key=lambda version: version or 0)
    assert (reader.versions[0], reader.versions[-1], len(reader.versions)) == (0, 8, 500)
    assert reader.outputs == 2
    clean = Reader(made(clock), "a", max_tokens=500)
    await clock.advance(100)
    assert reader.tokens == clean.tokens


async def test_a_reset_is_busy_while_requests_run() -> None:
    """Unless they are recomputed."""
    clock = ManualClock()
    engine = made(clock)
    reader = Reader(engine, "a", max_tokens=500)
    await clock.advance(1)
    with pytest.raises(TurnoutError) as caught:
        await engine.reset_caches(ALL_CACHES, False, False, T)
    assert caught.value.reason == "CACHE_BUSY"
    await engine.reset_caches(frozenset({Cache.ENCODER}), False, False, T)
    await engine.reset_caches(ALL_CACHES, True, False, T)
    await clock.advance(100)
    assert len(reader.tokens) == 500


async def test_a_request_over_sleeping_memory_kills_the_engine() -> None:
    """What the controller must never let happen."""
    clock = ManualClock()
    engine = made(clock)
    await engine.sleep(1, T)
    await engine.resume(T)
    reader = Reader(engine, "a")
    with pytest.raises(TurnoutError) as caught:
        await reader.task
    assert dies(caught)
    with pytest.raises(TurnoutError) as caught:
        await engine.probe()
    assert dies(caught)


async def test_sleep_under_running_requests_kills_the_engine() -> None:
    """And ends their streams with an error."""
    clock = ManualClock()
    engine = made(clock)
    reader = Reader(engine, "a")
    await clock.advance(1)
    with pytest.raises(TurnoutError) as caught:
        await engine.sleep(2, T)
    assert dies(caught)
    with pytest.raises(TurnoutError) as caught:
        await reader.task
    assert dies(caught)


@pytest.mark.parametrize("how", ["update", "reload"])
async def test_weights_into_sleeping_memory_kill_the_engine(how: str) -> None:
    """The trainer only saw a time-out."""
    engine = made(ManualClock())
    await engine.sleep(1, T)
    call: Awaitable[object]
    if how == "update":
        call = engine.start_weight_update("u", 1, adapter=False, timeout=T)
    else:
        call = engine.collective_rpc("reload_weights", "", None, T)
    with pytest.raises(TurnoutError) as caught:
        await call
    assert dies(caught)


async def test_a_wake_with_an_unknown_tag_does_nothing() -> None:
    """Silently."""
    engine = made(ManualClock())
    await engine.sleep(1, T)
    await engine.wake_up([WEIGHTS, "bogus"], T)
    assert (await engine.probe()).resident_tags == frozenset()


async def test_kv_is_released_only_when_paused_and_awake() -> None:
    """Needs a finished pause and everything resident."""
    engine = made(ManualClock())
    with pytest.raises(TurnoutError) as caught:
        await engine.release_kv_cache(T)
    assert caught.value.reason == "NOT_PAUSED"
    await engine.pause(PauseMode.ABORT, True, T)
    await engine.release_kv_cache(T)
    assert (await engine.probe()).resident_tags == {WEIGHTS}
    await engine.resume_kv_cache(T)
    assert not (await engine.probe()).paused


async def test_an_update_is_whole_or_not_at_all() -> None:
    """Every way in which weights can fail to arrive."""
    engine = made(ManualClock(), weights_loaded=False)
    with pytest.raises(TurnoutError, match="expects no weights"):
        await engine.update_weights(1, "", chunks(b"x"), T)
    await engine.start_weight_update("u", 1, adapter=False, timeout=T)
    with pytest.raises(TurnoutError, match="no weights arrived"):
        await engine.finish_weight_update("", T)
    with pytest.raises(TurnoutError, match="bytes of weights"):
        await engine.update_weights(5000, "", chunks(b"x" * 5000), T)
    assert not await engine.abort_weight_update(T)
    await engine.start_weight_update("u", 1, adapter=False, timeout=T)
    with pytest.raises(TurnoutError, match="1500 of 2000"):
        await engine.update_weights(2000, "", chunks(b"x" * 1500), T)
    assert (await engine.probe()).weights is Weights.HALF_UPDATED
    assert await engine.abort_weight_update(T)
    with pytest.raises(TurnoutError) as caught:
        await load(engine, 1, checksum="00000000")
    assert caught.value.reason == "CHECKSUM_MISMATCH"
    await load(engine, 2, b"y" * 2000, checksum=f"{google_crc32c.value(b'y' * 2000):08x}")
    state = await engine.probe()
    assert (state.weights, state.weight_version) == (Weights.INTACT, 2)


async def test_an_adapter_leaves_the_base_version() -> None:
    """Two versions, told apart."""
    engine = made(ManualClock(), weight_version=3)
    await engine.start_weight_update("u", 9, adapter=True, timeout=T)
    await engine.update_weights(1, "", chunks(b"x"), T)
    await engine.finish_weight_update("", T)
    state = await engine.probe()
    assert (state.weight_version, state.adapter_version, state.weights) == (3, 9, Weights.INTACT)


async def test_durations_are_domain_time() -> None:
    """They make a demo cost what a cluster costs."""
    clock = ManualClock()
    engine = made(clock, EngineConfig(weights_bytes=4096, kv_bytes=1, sleep_seconds=5, wake_seconds=7, load_seconds=18))
    for call, seconds in ((engine.sleep(1, T), 5), (engine.wake_up([WEIGHTS, KV_CACHE], T), 7), (load(engine, 1), 18)):
        task = asyncio.ensure_future(call)
        await clock.advance(seconds - 0.1)
        assert not task.done()
        await clock.advance(0.2)
        assert task.done()


async def test_workers_methods_reach_shards() -> None:
    """One, or all."""
    engine = made(ManualClock(), shards=3)
    assert len((await engine.collective_rpc("weight_checksum", "", None, T)).shards) == 3
    assert [s.shard for s in (await engine.collective_rpc("weight_checksum", "", 2, T)).shards] == [2]
    with pytest.raises(TurnoutError) as caught:
        await engine.collective_rpc("weight_checksum", "", 3, T)
    assert caught.value.metadata["field"] == "shard"
    with pytest.raises(TurnoutError, match="no method"):
        await engine.collective_rpc("unknown", "", None, T)


async def test_faults_on_command() -> None:
    """Tests of the layers above need an engine that fails when told."""
    engine = made(ManualClock())
    await engine.collective_rpc("fault_fail", '{"kwargs": {"call": "sleep"}}', None, T)
    with pytest.raises(TurnoutError) as caught:
        await engine.sleep(1, T)
    assert caught.value.reason == "ENGINE_FAILED"
    await engine.collective_rpc("fault_hang", '{"kwargs": {"probe": true}}', None, T)
    hung = [asyncio.ensure_future(engine.sleep(1, T)), asyncio.ensure_future(engine.probe())]
    await asyncio.sleep(0)
    assert not any(task.done() for task in hung)
    await engine.collective_rpc("fault_heal", "", None, T)
    await asyncio.gather(*hung)
    await engine.collective_rpc("fault_slow", '{"kwargs": {"seconds": 0.01}}', None, T)
    await engine.wake_up([WEIGHTS, KV_CACHE], T)
    await engine.collective_rpc("fault_die", "", None, T)
    with pytest.raises(TurnoutError) as caught:
        await engine.probe()
    assert dies(caught)
    await engine.close()
