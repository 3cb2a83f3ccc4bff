"""Tests of the learning job. Those that need torch are for the environment of a real vLLM: `make test-vllm`."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_grpo.py", "test_learning.py", "test_job.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Importing torch and transformers alone takes many seconds on a busy machine."""
    for item in items:
        if item.path.name in ("test_grpo.py", "test_learning.py", "test_job.py") and "learner" in item.path.parts:
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.filterwarnings("default"))
