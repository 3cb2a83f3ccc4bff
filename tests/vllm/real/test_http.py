"""A real API server with its development routes on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio

from services.engine.backends.vllm_http import open_backend
from services.engine.domain.requests import Finish
from services.engine.domain.spec import ALL_CACHES, KV_CACHE, WEIGHTS, PauseMode, ReplicaSpec, Role, Weights
from services.engine.guarded.http import HttpPeers
from services.engine.vllm.config import CPU_ENVIRONMENT
from services.engine.vllm.http import HttpSurface
from services.runtime.clock import MonotonicClock
from services.runtime.errors import TurnoutError
from tests.vllm.real.engines import ENVIRONMENT, LONG, Engine, greedy, refused, weights_file
from tests.vllm.real.test_weights import nothing

KV = 128 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(models: Path) -> AsyncIterator[tuple[str, psutil.Process]]:
    """The URL of a server, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--model", str(models / "old" / "tiny-llama"), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager"]
    arguments += ["--kv-cache-memory-bytes", str(KV), "--gpu-memory-utilization", "0.1"]
    arguments += ["--worker-cls", "services.engine.vllm.worker.SleepingCpuWorker"]
    arguments += ["--weight-transfer-config", '{"backend": "file"}']
    environment = os.environ | CPU_ENVIRONMENT | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"}
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *arguments]
    process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    family: list[psutil.Process] = []
    try:
        async with asyncio.timeout(400), httpx.AsyncClient() as client:
            while True:
                assert process.is_running()
                try:
                    if (await client.get(f"{url}/health", timeout=1)).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.5)
        family = process.children(recursive=True)
        yield url, process
    finally:
        # A server that a test has killed has left its children to others.
        family = family or process.children(recursive=True)
        family.append(process)
        for one in family:
            if one.is_running():
                one.kill()
        await asyncio.to_thread(psutil.wait_procs, family, 15)


@pytest_asyncio.fixture(loop_scope="session")
async def remote(server: tuple[str, psutil.Process]) -> AsyncIterator[Engine]:
    """A backend on the server."""
    backend = await open_backend(ReplicaSpec("r", Role.HYBRID, "vllm-http", server[0]), MonotonicClock(), HttpPeers())
    yield Engine(backend, backend._surface)
    await backend.close()


async def test_output_is_the_models(remote: Engine, models: Path) -> None:
    output = await remote.generate()
    assert (output.tokens, output.finish) == (greedy(models / "old" / "tiny-llama"), Finish.LENGTH)
    assert len(output.logprobs) == 20
    wrong = await remote.generate(prompt=[5, 1 << 20])
    assert wrong.error is not None
    assert wrong.error.reason == "TOKEN_OUT_OF_VOCABULARY"


async def test_aborts_reach_the_request_that_is_meant(remote: Engine) -> None:
    """A wrong id is answered 200 and ends nothing."""
    first, second = await remote.begin(request_id="first"), await remote.begin(request_id="second")
    await remote.backend.abort(["first"])
    assert (await first).finish is Finish.ABORT
    assert not second.done()
    await remote.backend.abort(None)
    assert (await second).finish is Finish.ABORT


async def test_h35_an_abort_that_overtakes_its_request_ends_it(remote: Engine) -> None:
    """It goes over a connection of its own, and the server forgets aborts of what it does not know yet."""
    for _ in range(5):
        output = asyncio.create_task(remote.generate(LONG, "overtaken"))
        while "overtaken" not in (await remote.backend.progress()).output_tokens:  # noqa: ASYNC110 - progress has no event
            await asyncio.sleep(0)
        await remote.backend.abort(["overtaken"])
        assert (await output).finish is Finish.ABORT


async def test_memory_comes_and_goes_over_http(
    remote: Engine, server: tuple[str, psutil.Process], models: Path
) -> None:
    """The whole way of a lend: asleep at level 2, weights awake, moved, KV awake, served."""
    awake = (await remote.backend.probe()).memory_bytes
    running = await remote.begin()
    await refused(remote.backend.sleep(2, 10), "FAILED_PRECONDITION", "NOT_DRAINED")
    await remote.backend.pause(PauseMode.ABORT, True, 10)
    assert (await running).finish is Finish.ABORT
    await remote.backend.sleep(2, 30)
    asleep = await remote.backend.probe()
    assert awake is not None
    assert asleep.memory_bytes is not None
    assert awake - asleep.memory_bytes >= 0.8 * KV
    assert asleep.weights is Weights.DISCARDED
    again = await open_backend(ReplicaSpec("r", Role.HYBRID, "vllm-http", server[0]), MonotonicClock(), HttpPeers())
    found = await again.probe()
    assert (found.resident_tags, found.sleep_level, found.weights) == (frozenset(), 2, Weights.DISCARDED)
    await again.close()
    await remote.backend.wake_up([WEIGHTS], 30)
    await remote.backend.start_weight_update("u", 3, False, 10)
    move = f'{{"mover": "file", "path": "{weights_file(models)}"}}'
    await remote.backend.update_weights(0, move, nothing(), 30)
    await remote.backend.finish_weight_update("", 30)
    await remote.backend.wake_up([KV_CACHE], 30)
    await remote.backend.reset_caches(ALL_CACHES, True, True, 10)
    await remote.backend.resume(10)
    output = await remote.generate()
    assert output.tokens == greedy(models / "new" / "tiny-llama")
    assert set(output.versions) == {3}


async def test_kv_is_released_alone_over_http(remote: Engine) -> None:
    await remote.backend.pause(PauseMode.ABORT, True, 10)
    before = (await remote.backend.probe()).memory_bytes
    await remote.backend.release_kv_cache(10)
    after = await remote.backend.probe()
    assert before is not None
    assert after.memory_bytes is not None
    assert before - after.memory_bytes >= 0.8 * KV
    assert after.resident_tags == {WEIGHTS}
    await remote.backend.resume_kv_cache(10)
    await remote.backend.resume(10)
    assert (await remote.generate(5)).finish is Finish.LENGTH


async def test_h38_a_killed_server_is_dead_within_a_second(remote: Engine, server: tuple[str, psutil.Process]) -> None:
    """Last in this file, for want of another server."""
    surface = remote.backend._surface
    assert isinstance(surface, HttpSurface)
    running = await remote.begin(900)
    waiting = asyncio.create_task(remote.backend.pause(PauseMode.WAIT, True, 60))
    await asyncio.sleep(0.1)
    killed = time.monotonic()
    os.kill(server[1].pid, signal.SIGKILL)
    output = await running
    assert output.error is not None
    assert output.error.code.name == "UNAVAILABLE"
    assert output.tokens
    with pytest.raises(TurnoutError) as ended:
        await waiting
    # The call's own connection may break before the server is found to be away.
    assert ended.value.reason in ("ENGINE_DEAD", "ENGINE_UNREACHABLE")
    assert time.monotonic() - killed < 2, "twice a second, for a machine under load"
