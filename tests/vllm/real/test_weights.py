"""New weights on a real engine: every way to move them, what goes wrong, and what the engine computes afterwards."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import google_crc32c
import pytest

from services.engine.domain.requests import Finish
from services.engine.domain.spec import ALL_CACHES, KV_CACHE, WEIGHTS, PauseMode, Weights
from tests.vllm.real.engines import Engine, greedy, refused, weights_file


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def in_chunks(data: bytes, size: int = 65536) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def begin(engine: Engine, version: int) -> None:
    await engine.backend.start_weight_update(f"update to {version}", version, False, 10)


async def commit(engine: Engine, version: int, checksum: str = "") -> None:
    await engine.backend.finish_weight_update(checksum, 30)
    await engine.backend.reset_caches(ALL_CACHES, True, True, 10)
    await engine.backend.resume(10)
    assert (await engine.backend.probe()).weight_version == version


@pytest.mark.parametrize("mover", ["bytes", "file", "transfer", "reload"])
async def test_every_mover_brings_the_new_weights(engine: Engine, models: Path, mover: str) -> None:
    """Afterwards the engine's greedy output is the new model's."""
    path = weights_file(models)
    data = path.read_bytes()
    crc32c = f"{google_crc32c.value(data):08x}"
    info = {
        "bytes": {},
        "file": {"mover": "file", "path": str(path), "crc32c": crc32c},
        "transfer": {"mover": "transfer", "init": {}, "update": {"path": str(path)}},
        "reload": {"mover": "reload", "path": str(path.parent)},
    }[mover]
    await engine.backend.pause(PauseMode.ABORT, True, 10)
    await begin(engine, 3)
    if mover == "bytes":
        await engine.backend.update_weights(len(data), "", in_chunks(data), 30)
    else:
        await engine.backend.update_weights(0, json.dumps(info), nothing(), 30)
    await commit(engine, 3, crc32c if mover == "bytes" else "")
    output = await engine.generate()
    assert output.tokens == greedy(path.parent)
    assert set(output.versions) == {3}
    assert await engine.raw.get_weight_version() == "3"


async def test_weights_come_to_an_engine_that_sleeps(engine: Engine, models: Path) -> None:
    """The order of a lend: weights awake, moved, KV awake last."""
    data = weights_file(models).read_bytes()
    await engine.backend.sleep(2, 30)
    await refused(engine.backend.start_weight_update("u", 4, False, 10), "FAILED_PRECONDITION", "TAG_ASLEEP")
    await engine.backend.wake_up([WEIGHTS], 30)
    await begin(engine, 4)
    await engine.backend.update_weights(len(data), "", in_chunks(data), 30)
    await engine.backend.finish_weight_update("", 30)
    await engine.backend.wake_up([KV_CACHE], 30)
    await refused(engine.backend.resume(10), "FAILED_PRECONDITION", "CACHE_OLDER_THAN_WEIGHTS")
    await engine.backend.reset_caches(ALL_CACHES, True, True, 10)
    await engine.backend.resume(10)
    assert (await engine.generate()).tokens == greedy(weights_file(models).parent)


async def test_h30_new_weights_need_empty_caches(engine: Engine, models: Path) -> None:
    """Until the reset no request reaches the engine, since it would mix two policies."""
    data = weights_file(models).read_bytes()
    await begin(engine, 3)
    await engine.backend.update_weights(len(data), "", in_chunks(data), 30)
    await engine.backend.finish_weight_update("", 30)
    output = await engine.generate()
    assert output.error is not None
    assert output.error.reason == "CACHE_OLDER_THAN_WEIGHTS"
    await engine.backend.reset_caches(ALL_CACHES, False, False, 10)
    assert (await engine.generate()).error is None


async def test_h31_a_failed_update_serves_only_after_a_whole_one(engine: Engine, models: Path) -> None:
    """A truncated file fails in the worker, in the middle of a session of vLLM's."""
    data = weights_file(models).read_bytes()
    await engine.backend.pause(PauseMode.ABORT, True, 10)
    await begin(engine, 5)
    cut = data[: len(data) // 2]
    await refused(engine.backend.update_weights(len(cut), "", in_chunks(cut), 30), "ABORTED", "ENGINE_FAILED")
    assert (await engine.backend.probe()).weights is Weights.HALF_UPDATED
    assert await engine.backend.abort_weight_update(10)
    await refused(engine.backend.resume(10), "FAILED_PRECONDITION", "WEIGHTS_HALF_UPDATED")
    output = await engine.generate()
    assert output.error is not None
    assert output.error.reason == "WEIGHTS_HALF_UPDATED"
    await begin(engine, 6)
    await engine.backend.update_weights(len(data), "", in_chunks(data), 30)
    await commit(engine, 6)
    assert (await engine.generate()).tokens == greedy(weights_file(models).parent)


async def test_h31_a_sleep_ends_an_open_update(engine: Engine, models: Path) -> None:
    """A reclaim in the middle: what was moved counts for nothing, and the next update begins anew."""
    data = weights_file(models).read_bytes()
    await engine.backend.pause(PauseMode.ABORT, True, 10)
    await begin(engine, 5)
    await engine.backend.update_weights(len(data), "", in_chunks(data), 30)
    await engine.backend.sleep(1, 30)
    await refused(engine.backend.finish_weight_update("", 30), "FAILED_PRECONDITION", "UPDATE_NOT_STARTED")
    await engine.backend.wake_up([WEIGHTS], 30)
    assert (await engine.backend.probe()).weights is Weights.HALF_UPDATED
    await begin(engine, 6)
    await engine.backend.update_weights(len(data), "", in_chunks(data), 30)
    await engine.backend.finish_weight_update("", 30)
    await engine.backend.wake_up([KV_CACHE], 30)
    await engine.backend.reset_caches(ALL_CACHES, True, True, 10)
    await engine.backend.resume(10)
    assert (await engine.generate()).tokens == greedy(weights_file(models).parent)


async def test_a_wrong_checksum_is_data_loss(engine: Engine, models: Path) -> None:
    path = weights_file(models)
    data = path.read_bytes()
    await engine.backend.pause(PauseMode.ABORT, True, 10)
    await begin(engine, 6)
    wrong = json.dumps({"mover": "file", "path": str(path), "crc32c": "00000000"})
    await refused(engine.backend.update_weights(0, wrong, nothing(), 30), "ABORTED", "ENGINE_FAILED")
    await engine.backend.update_weights(len(data), "", in_chunks(data), 30)
    await refused(engine.backend.finish_weight_update("00000000", 30), "DATA_LOSS", "CHECKSUM_MISMATCH")
    await commit(engine, 6, f"{google_crc32c.value(data):08x}")


async def test_an_acknowledgement_alone_is_no_load(engine: Engine) -> None:
    """After level 2 something must have been moved, by whatever means; the trainer's own are named."""
    await engine.backend.sleep(2, 30)
    await engine.backend.wake_up([WEIGHTS], 30)
    await begin(engine, 7)
    await refused(engine.backend.finish_weight_update("", 30), "ABORTED", "WEIGHTS_INCOMPLETE")
    await engine.surface.collective_rpc("reload_weights", (), {})
    await engine.backend.update_weights(0, '{"mover": "own"}', nothing(), 30)
    await engine.backend.finish_weight_update("", 30)
    await engine.backend.wake_up([KV_CACHE], 30)
    await engine.backend.reset_caches(ALL_CACHES, True, True, 10)
    await engine.backend.resume(10)
    assert (await engine.generate()).finish is Finish.LENGTH


async def test_requests_that_are_kept_go_on_under_the_new_weights(engine: Engine, models: Path) -> None:
    """KEEP_RECOMPUTE: what was generated stays, each token with the version that made it."""
    old = await engine.generate(300)
    data = weights_file(models).read_bytes()
    running = await engine.begin(300)
    await engine.backend.pause(PauseMode.KEEP, True, 10)
    await engine.backend.release_kv_cache(10)
    await begin(engine, 8)
    await engine.backend.update_weights(len(data), "", in_chunks(data), 30)
    await engine.backend.finish_weight_update("", 30)
    await engine.backend.resume_kv_cache(10)
    await engine.backend.reset_caches(ALL_CACHES, True, True, 10)
    await engine.backend.resume(10)
    output = await running
    assert (len(output.tokens), output.finish) == (300, Finish.LENGTH)
    assert set(output.versions) == {0, 8}
    kept = output.versions.index(8)
    assert set(output.versions[:kept]) == {0}
    assert output.tokens[:kept] == old.tokens[:kept]
    assert output.tokens != old.tokens
