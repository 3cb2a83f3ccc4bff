"""What every test with a real vLLM needs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _sockets() -> Iterator[None]:
    """A place for vLLM's sockets, which an engine that is killed leaves behind. Short, as paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_RPC_BASE_PATH", directory)
        yield
