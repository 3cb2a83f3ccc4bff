"""Ways to move weights, on an engine that only remembers what it was told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import google_crc32c
import pytest

from services.engine.domain.spec import Weights
from services.engine.guarded import surface as calls
from services.runtime.errors import TurnoutError
from tests.engine.guarded.fake import EVERYTHING, FakeSurface, backend_on

DATA = b"weights " * 1000


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def text(**info: object) -> str:
    return json.dumps(info)


async def test_bytes_become_a_file_for_the_worker_and_nothing_stays(tmp_path: Path) -> None:
    surface = FakeSurface()
    backend = backend_on(surface, str(tmp_path))
    await backend.start_weight_update("u", 3, False, 5)
    await backend.update_weights(len(DATA), "", chunks(DATA[:100], DATA[100:]), 5)
    [info] = surface.infos
    assert Path(info["path"]).parent == tmp_path
    assert info["crc32c"] == f"{google_crc32c.value(DATA):08x}"
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 - a folder of a test
    await backend.finish_weight_update(info["crc32c"], 5)
    assert surface.calls == ["init_transfer", "start_update", "update_weights", "finish_update", "set_version 3"]


async def test_two_moves_have_one_session_and_one_checksum(tmp_path: Path) -> None:
    surface = FakeSurface()
    backend = backend_on(surface, str(tmp_path))
    await backend.start_weight_update("u", 3, False, 5)
    await backend.update_weights(len(DATA), "", chunks(DATA), 5)
    await backend.update_weights(4, "", chunks(b"tail"), 5, 1)
    await backend.finish_weight_update(f"{google_crc32c.value(DATA + b'tail'):08x}", 5)
    assert surface.calls.count("start_update") == surface.calls.count("finish_update") == 1
    await backend.start_weight_update("v", 4, False, 5)
    await backend.update_weights(len(DATA), "", chunks(DATA), 5)
    assert surface.calls.count("init_transfer") == 1


async def test_a_move_that_is_made_again_counts_once_in_the_checksum(tmp_path: Path) -> None:
    """Its answer was lost, and the repeat made right weights fail the comparison."""
    backend = backend_on(FakeSurface(), str(tmp_path))
    await backend.start_weight_update("u", 3, False, 5)
    await backend.update_weights(len(DATA), "", chunks(DATA), 5)
    for _ in range(2):
        await backend.update_weights(4, "", chunks(b"tail"), 5, 1)
    await backend.finish_weight_update(f"{google_crc32c.value(DATA + b'tail'):08x}", 5)
    await backend.start_weight_update("v", 4, False, 5)
    await backend.update_weights(4, "", chunks(b"tail"), 5)
    await backend.update_weights(len(DATA), "", chunks(DATA), 5)
    with pytest.raises(TurnoutError):
        await backend.finish_weight_update(f"{google_crc32c.value(DATA + b'x'):08x}", 5)
    await backend.finish_weight_update(f"{google_crc32c.value(DATA):08x}", 5)


async def test_moves_that_another_controller_made_leave_the_checksum_unknown(tmp_path: Path) -> None:
    """They cannot be compared with what the trainer expects, and must not fail for it."""
    backend = backend_on(FakeSurface(), str(tmp_path))
    await backend.start_weight_update("u", 3, False, 5)
    await backend.update_weights(4, "", chunks(b"tail"), 5, 2)
    await backend.update_weights(4, "", chunks(b"tail"), 5, 3)
    await backend.finish_weight_update("00000001", 5)


@pytest.mark.parametrize(
    ("moves", "refused"),
    [
        ([text(mover="file", path="/w", crc32c="0000000a")], True),
        ([text(mover="file", path="/w")], False),
        ([text(mover="file", path="/w", crc32c="0000000a"), text(mover="file", path="/x", crc32c="0000000b")], False),
        ([text(mover="reload", path="/model")], False),
        ([text(mover="own")], False),
    ],
)
async def test_a_checksum_is_compared_with_a_file_whose_own_is_known(moves: list[str], refused: bool) -> None:
    """The worker has read exactly that file; of several together, or by other means, nobody knows it."""
    backend = backend_on(FakeSurface())
    await backend.start_weight_update("u", 3, False, 5)
    for index, move in enumerate(moves):
        await backend.update_weights(0, move, chunks(), 5, index)
    if refused:
        with pytest.raises(TurnoutError) as caught:
            await backend.finish_weight_update("0000000b", 5)
        assert caught.value.reason == "CHECKSUM_MISMATCH"
    await backend.finish_weight_update("0000000a" if refused else "0000000b", 5)


async def test_bytes_that_end_early_touch_nothing(tmp_path: Path) -> None:
    surface = FakeSurface()
    backend = backend_on(surface, str(tmp_path))
    await backend.start_weight_update("u", 3, False, 5)
    with pytest.raises(TurnoutError, match="of 8000 bytes"):
        await backend.update_weights(len(DATA), "", chunks(DATA[:10]), 5)
    assert not await backend.abort_weight_update(5)
    assert (await backend.probe()).weights is Weights.INTACT
    assert surface.calls == []
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 - a folder of a test


async def test_a_move_that_fails_in_the_engine_leaves_it_half_updated() -> None:
    """vLLM closes its session by itself; the next move opens another."""
    surface = FakeSurface()
    backend = backend_on(surface)
    await backend.start_weight_update("u", 3, False, 5)
    surface.fail.add("update_weights")
    move = text(mover="file", path="/w.safetensors")
    with pytest.raises(TurnoutError, match="told to fail"):
        await backend.update_weights(0, move, chunks(), 5)
    assert (await backend.probe()).weights is Weights.HALF_UPDATED
    surface.fail.clear()
    await backend.update_weights(0, move, chunks(), 5)
    await backend.finish_weight_update("", 5)
    assert surface.calls.count("start_update") == 2
    assert (await backend.probe()).weights is Weights.INTACT


async def test_the_same_update_again_goes_on_with_it() -> None:
    """A controller that was started again says it once more; what came is not lost."""
    surface = FakeSurface()
    backend = backend_on(surface, weights_loaded=False)
    await backend.start_weight_update("u", 3, False, 5)
    await backend.update_weights(0, text(mover="own"), chunks(), 5)
    await backend.start_weight_update("u", 3, False, 5)
    await backend.finish_weight_update("", 5)
    assert (await backend.probe()).weights is Weights.INTACT
    await backend.start_weight_update("v", 4, False, 5)
    await backend.abort_weight_update(5)


@pytest.mark.parametrize(
    ("size", "info"),
    [
        (0, "[]"),
        (0, "{"),
        (0, text(mover="nccl")),
        (0, text(mover="file", path="relative")),
        (0, text(mover="reload")),
        (0, ""),
        (0, text(mover="own", path="/x")),
        (0, text(mover="file", path="/x", crc32c="beef")),
        (0, text(mover="file", path="/x", crc32c=7)),
        (5, text(mover="reload", path="/x")),
        (5, text(mover="file", path="/x")),
    ],
)
async def test_moves_that_make_no_sense_are_refused(size: int, info: str) -> None:
    surface = FakeSurface()
    backend = backend_on(surface)
    await backend.start_weight_update("u", 3, False, 5)
    with pytest.raises(TurnoutError) as caught:
        await backend.update_weights(size, info, chunks(b"12345"[:size]), 5)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    assert surface.calls == []
    assert (await backend.probe()).weights is Weights.INTACT


async def test_an_engine_without_the_transfer_api_says_so() -> None:
    surface = FakeSurface(EVERYTHING - {calls.WEIGHT_TRANSFER})
    backend = backend_on(surface)
    await backend.start_weight_update("u", 3, False, 5)
    with pytest.raises(TurnoutError, match="mover transfer"):
        await backend.update_weights(0, text(mover="transfer", update={}), chunks(), 5)
    assert (await backend.probe()).weights is Weights.INTACT
    await backend.update_weights(0, text(mover="reload", path="/model"), chunks(), 5)
    assert surface.infos == [{"weights_path": "/model"}]


async def test_adapters_are_refused_before_anything_happens() -> None:
    surface = FakeSurface()
    with pytest.raises(TurnoutError, match="adapters"):
        await backend_on(surface).start_weight_update("u", 3, True, 5)
    assert surface.calls == []
