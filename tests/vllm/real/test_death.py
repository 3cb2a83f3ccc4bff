"""Engines that die: how soon it is known, and what vLLM dies of when nobody stops it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest_asyncio

from services.engine.domain.spec import PauseMode
from services.engine.guarded.surface import Draw
from tests.vllm.real.engines import PROMPT, Engine, refused, start_engine

SOON_S = 1.0
"""The promise: an engine death is noticed within a second."""


@pytest_asyncio.fixture(loop_scope="session")
async def mortal(models: Path) -> AsyncIterator[Engine]:
    """An engine of its own for one test."""
    before = {child.pid for child in psutil.Process().children()}
    surface = await start_engine(models / "old" / "tiny-llama", kv_bytes=64 << 20)
    engine = Engine.on(surface)
    engine.processes = [child.pid for child in psutil.Process().children() if child.pid not in before]
    yield engine
    await surface.close()


def core(engine: Engine) -> int:
    """Process id of the engine core, which is the parent of the worker."""
    return next(pid for pid in engine.processes if psutil.Process(pid).children())


async def test_h38_a_killed_core_ends_everything_within_a_second(mortal: Engine) -> None:
    """A pause that waits for requests hangs for ever in vLLM; tokens so far are kept."""
    running = await mortal.begin(900)
    waiting = asyncio.create_task(mortal.backend.pause(PauseMode.WAIT, True, 60))
    await asyncio.sleep(0.1)
    killed = time.monotonic()
    os.kill(core(mortal), signal.SIGKILL)
    await refused(waiting, "UNAVAILABLE", "ENGINE_DEAD")
    output = await running
    assert time.monotonic() - killed < 2 * SOON_S, "twice, for a machine under load"
    assert output.error is not None
    assert output.error.reason == "ENGINE_DEAD"
    assert output.tokens
    await refused(mortal.backend.probe(), "UNAVAILABLE", "ENGINE_DEAD")
    await refused(mortal.backend.sleep(1, 10), "UNAVAILABLE", "ENGINE_DEAD")
    assert (await mortal.generate(5)).error is not None


async def test_h38_a_core_that_is_killed_while_idle_is_noticed(mortal: Engine) -> None:
    """Nothing is in the engine that could fail, and no probe is due."""
    watching = asyncio.create_task(mortal.backend.watch())
    await asyncio.sleep(0.1)
    killed = time.monotonic()
    os.kill(core(mortal), signal.SIGKILL)
    await watching
    await refused(mortal.backend.probe(), "UNAVAILABLE", "ENGINE_DEAD")
    assert time.monotonic() - killed < 2 * SOON_S


async def test_a_death_in_a_call_that_vllm_never_ends(mortal: Engine) -> None:
    """The core is stopped in the middle of a call, and killed: nothing in vLLM would wake whoever waits."""
    os.kill(core(mortal), signal.SIGSTOP)
    waiting = asyncio.create_task(mortal.backend.sleep(1, 60))
    await asyncio.sleep(0.2)
    killed = time.monotonic()
    os.kill(core(mortal), signal.SIGKILL)
    await refused(waiting, "UNAVAILABLE", "ENGINE_DEAD")
    assert time.monotonic() - killed < 2 * SOON_S


async def test_h38_a_hung_core_is_unresponsive_and_nothing_overtakes(mortal: Engine) -> None:
    """Stopped, it answers nothing: calls meet their deadline, and the probe says which one is overdue."""
    pid = core(mortal)
    os.kill(pid, signal.SIGSTOP)
    try:
        await refused(mortal.backend.sleep(1, 0.5), "DEADLINE_EXCEEDED", "ENGINE_TIMEOUT")
        await refused(mortal.backend.probe(), "DEADLINE_EXCEEDED", "ENGINE_UNRESPONSIVE")
        await refused(mortal.backend.wake_up(["weights"], 0.5), "DEADLINE_EXCEEDED", "REPLICA_BUSY")
    finally:
        os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(20):
        while mortal.backend._line.busy:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)
    assert (await mortal.backend.probe()).sleep_level == 1, "the sleep was carried out late, and that is known"
    await mortal.backend.wake_up(["weights", "kv_cache"], 30)
    await mortal.backend.resume(10)
    assert len((await mortal.generate(5)).tokens) == 5


async def test_h26_vllm_dies_of_a_resume_over_freed_memory(mortal: Engine) -> None:
    """The hazard itself, and that a backend above keeps it away: should this fail one day, vLLM has become safer."""
    await mortal.backend.sleep(1, 30)
    await refused(mortal.backend.resume(10), "FAILED_PRECONDITION", "TAG_ASLEEP")
    output = await mortal.generate(5)
    assert output.error is not None
    assert output.error.reason == "TAG_ASLEEP"
    assert not mortal.raw.errored
    await mortal.surface.resume()
    await _dies(mortal, PROMPT)


async def test_vllm_dies_of_a_token_outside_the_vocabulary(mortal: Engine) -> None:
    """The hazard itself."""
    await _dies(mortal, (5, 1 << 20))


async def _dies(mortal: Engine, prompt: tuple[int, ...]) -> None:
    stream = mortal.surface.generate("fatal", prompt, Draw(5, 0.0, 1.0, 0, None, (), False))

    async def read() -> None:
        async for _ in stream:
            pass

    await refused(asyncio.wait_for(read(), 30), "UNAVAILABLE", "ENGINE_DEAD")
    assert mortal.raw.errored
