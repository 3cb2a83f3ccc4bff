"""Pauses, requests, aborts and cache resets of a real engine."""

from __future__ import annotations

import asyncio
import contextlib

from services.engine.domain.requests import Finish
from services.engine.domain.spec import ALL_CACHES, Cache, PauseMode
from services.runtime.errors import TurnoutError
from tests.vllm.real.engines import LONG, Engine, refused


async def test_output_has_tokens_log_probabilities_and_versions(engine: Engine) -> None:
    output = await engine.generate(20)
    assert (len(output.tokens), len(output.logprobs), output.finish) == (20, 20, Finish.LENGTH)
    assert all(value <= 0 for value in output.logprobs)
    assert set(output.versions) == {0}


async def test_a_continued_request_ends_as_one_that_was_never_cut(engine: Engine) -> None:
    """The budget is over all of its output."""
    whole = await engine.generate(40)
    rest = await engine.generate(40, so_far=whole.tokens[:15])
    assert rest.tokens == whole.tokens[15:]
    nothing_left = await engine.generate(40, so_far=whole.tokens)
    assert (nothing_left.tokens, nothing_left.finish) == ([], Finish.LENGTH)


async def test_deltas_are_gathered(engine: Engine) -> None:
    parts = [part async for part in engine.backend.generate(engine.request(64, delta_tokens=16))]
    assert len(parts) <= 5
    assert sum(len(part.token_ids) for part in parts) == 64


async def test_h39_abort_ends_requests_with_their_tokens(engine: Engine) -> None:
    running = [await engine.begin() for _ in range(3)]
    await engine.backend.pause(PauseMode.ABORT, True, 10)
    outputs = await asyncio.gather(*running)
    assert all(output.finish is Finish.ABORT and output.tokens for output in outputs)
    await engine.backend.resume(10)
    assert (await engine.generate(5)).finish is Finish.LENGTH


async def test_h39_wait_lets_requests_finish(engine: Engine) -> None:
    running = await engine.begin(300)
    await engine.backend.pause(PauseMode.WAIT, True, 60)
    assert (await running).finish is Finish.LENGTH
    assert (await engine.backend.probe()).paused


async def test_h39_keep_freezes_and_goes_on(engine: Engine) -> None:
    whole = await engine.generate(300)
    running = await engine.begin(300)
    await engine.backend.pause(PauseMode.KEEP, True, 10)
    frozen = (await engine.backend.progress()).decoded_tokens
    await asyncio.sleep(0.3)
    assert (await engine.backend.progress()).decoded_tokens == frozen
    assert not running.done()
    await engine.backend.resume(10)
    assert (await running).tokens == whole.tokens


async def test_a_wait_that_is_given_up_leaves_nothing_behind(engine: Engine) -> None:
    """vLLM's own wait goes on inside the engine, and stops or even frees it when nobody expects that any more."""
    running = await engine.begin(600)
    await refused(engine.backend.pause(PauseMode.WAIT, True, 0.1), "DEADLINE_EXCEEDED", "ENGINE_TIMEOUT")
    engine.backend._line.drop()
    await running
    await asyncio.sleep(0.2)
    assert not await engine.raw.is_paused()
    assert (await engine.generate(5)).finish is Finish.LENGTH


async def test_requests_of_a_paused_engine_wait(engine: Engine) -> None:
    await engine.backend.pause(PauseMode.ABORT, True, 10)
    waiting = asyncio.create_task(engine.generate(5))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert (await engine.backend.probe()).running == 1
    await engine.backend.resume(10)
    assert (await waiting).finish is Finish.LENGTH


async def test_h29_a_reset_that_vllm_refuses_is_no_success(engine: Engine) -> None:
    running = await engine.begin()
    prefix = frozenset({Cache.PREFIX})
    await refused(engine.backend.reset_caches(prefix, False, True, 10), "FAILED_PRECONDITION", "CACHE_BUSY")
    await engine.backend.reset_caches(ALL_CACHES, True, True, 10)
    await engine.backend.abort(None)
    assert (await running).tokens


async def test_h35_a_live_id_is_taken(engine: Engine) -> None:
    """vLLM takes it twice, and one abort ends both."""
    running = await engine.begin(request_id="twice")
    again = await engine.generate(5, request_id="twice")
    assert again.error is not None
    assert again.error.reason == "REQUEST_LIVE"
    await engine.backend.abort(["unknown", "twice"])
    assert (await running).finish is Finish.ABORT
    await engine.backend.abort(["twice"])
    assert (await engine.generate(5, request_id="twice")).finish is Finish.LENGTH


async def test_h36_aborts_of_unknown_requests_leave_nothing(engine: Engine) -> None:
    """A later request of such an id runs to its end."""
    await engine.backend.abort([f"unknown-{number}" for number in range(1000)])
    assert (await engine.generate(5, request_id="unknown-7")).finish is Finish.LENGTH
    assert not engine.raw.output_processor.request_states


async def test_tokens_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    """They kill an engine without a tokenizer."""
    for prompt in ([5, 1024], [5, -1], [2**31]):
        output = await engine.generate(5, prompt=prompt)
        assert output.error is not None
        assert output.error.reason == "TOKEN_OUT_OF_VOCABULARY"
    output = await engine.generate(30, so_far=[5000])
    assert output.error is not None
    assert (await engine.generate(5)).finish is Finish.LENGTH


async def test_a_prompt_that_is_too_long_is_the_callers_fault(engine: Engine) -> None:
    output = await engine.generate(5, prompt=[5] * 2000)
    assert output.error is not None
    assert output.error.code.name == "INVALID_ARGUMENT"


async def test_h33_a_worker_that_fails_is_an_error_and_the_engine_goes_on(engine: Engine) -> None:
    """vLLM raises a bare Exception."""
    await refused(engine.backend.collective_rpc("no_such_method", "", None, 10), "ABORTED", "ENGINE_FAILED")
    assert (await engine.generate(5)).finish is Finish.LENGTH


async def test_closing_a_stream_ends_the_request(engine: Engine) -> None:
    stream = engine.backend.generate(engine.request(500))
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(5):
        while (await engine.backend.probe()).running:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


async def test_progress_counts_what_came_out(engine: Engine) -> None:
    running = await engine.begin(request_id="counted")
    progress = await engine.backend.progress()
    assert progress.running == 1
    assert 1 <= progress.output_tokens["counted"] <= LONG
    assert progress.prefilled_tokens == 3
    await engine.backend.abort(None)
    await running
    assert (await engine.backend.progress()).output_tokens == {}


async def test_h32_racing_wakes_and_resumes(engine: Engine) -> None:
    """Fifty at once: the engine is awake, runs, and answers."""
    await engine.backend.sleep(1, 30)
    await engine.backend.wake_up(["weights"], 10)

    async def resume() -> None:
        with contextlib.suppress(TurnoutError):
            await engine.backend.resume(30)

    calls = [engine.backend.wake_up(["kv_cache"], 30) if i % 2 else resume() for i in range(50)]
    await asyncio.gather(*calls)
    assert (await engine.generate(5)).finish is Finish.LENGTH


async def test_h37_control_calls_are_not_queued_behind_requests(engine: Engine) -> None:
    """Forty long requests, of which the engine runs eight: probes and a pause pass them all."""
    running = [asyncio.create_task(engine.generate(500)) for _ in range(40)]
    async with asyncio.timeout(60):
        while (await engine.backend.progress()).running < 8:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    assert (await engine.backend.probe()).running == 40
    await engine.backend.pause(PauseMode.ABORT, True, 10)
    outputs = await asyncio.gather(*running)
    assert {output.finish for output in outputs} == {Finish.ABORT}, "none had the time to end by itself"
