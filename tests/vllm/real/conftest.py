"""Tests against a real vLLM. They exist only where one is installed: `make test-vllm`.

One engine serves most of them; those that kill one start their own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine lives in one event loop, and takes its time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.timeout(600))
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sets of weights of one tiny model: `old/tiny-llama` and `new/tiny-llama`."""
    from services.engine.vllm.tiny_models import write_tiny_model

    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "old", seed=0)
    write_tiny_model(root / "new", seed=1)
    return root


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(models: Path) -> AsyncIterator[Any]:
    """The surface of one engine for many tests."""
    from tests.vllm.real.engines import start_engine

    surface = await start_engine(models / "old" / "tiny-llama")
    yield surface
    await surface.close()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared_engine: Any, models: Path) -> AsyncIterator[Any]:
    """A backend on the shared engine: awake, running, empty, with the old weights as version 0."""
    from tests.vllm.real.engines import Engine, restore

    await restore(shared_engine, models)
    engine = Engine.on(shared_engine)
    yield engine
    await restore(shared_engine, models)
