"""Our calls against the signatures of vLLM's versions, recorded in `signatures/`.

Where a vLLM is installed, its live signatures are compared with the record of its version, so a record cannot rot.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.guarded import surface as calls
from services.engine.vllm.async_llm import METHODS

RECORDS = Path(__file__).parent / "signatures"
VERSIONS = sorted(path.stem for path in RECORDS.glob("*.json"))

CALLED: dict[str, set[str]] = {
    "sleep": {"level", "mode"},
    "wake_up": {"tags"},
    "is_sleeping": set(),
    "is_paused": set(),
    "release_kv_cache_memory": set(),
    "pause_generation": {"mode", "clear_cache"},
    "resume_generation": set(),
    "reset_prefix_cache": {"reset_running_requests", "reset_connector"},
    "reset_mm_cache": set(),
    "reset_encoder_cache": set(),
    "collective_rpc": {"method", "args", "kwargs"},
    "init_weight_transfer_engine": {"request"},
    "start_weight_update": set(),
    "update_weights": {"request"},
    "finish_weight_update": set(),
    "update_weight_version": {"new_version"},
    "get_weight_version": set(),
    "get_num_unfinished_requests": set(),
    "abort": {"request_id"},
    "generate": {"prompt", "sampling_params", "request_id"},
    "shutdown": {"timeout"},
    "errored": set(),
}
"""Every name of AsyncLLM that `async_llm.py` uses, and the parameters it gives."""


def record(version: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RECORDS / f"{version}.json").read_text())
    return content


def test_the_versions_that_matter_are_recorded() -> None:
    assert {"0.32.0", "0.33.0"} <= set(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_we_call_is_there(version: str) -> None:
    """And can be called as we call it: nothing else is required."""
    methods = record(version)["AsyncLLM"]
    for name, parameters in CALLED.items():
        assert name in methods, name
        known = methods[name]
        assert parameters <= set(known["parameters"]), name
        assert set(known["required"]) <= parameters, name


@pytest.mark.parametrize("version", VERSIONS)
def test_all_calls_are_found_in_it(version: str) -> None:
    """Both versions offer everything that is looked for."""
    methods = record(version)["AsyncLLM"]
    found = {
        call
        for call, (method, parameter) in METHODS.items()
        if method in methods and (not parameter or parameter in methods[method]["parameters"])
    }
    assert found == set(METHODS)


@pytest.mark.parametrize("version", VERSIONS)
def test_sampling_parameters_are_known(version: str) -> None:
    ours = {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "logprobs", "detokenize"}
    assert ours | {"output_kind"} <= set(record(version)["SamplingParams"])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM is installed here")
def test_the_record_is_that_of_the_installed_version() -> None:
    from tests.vllm.signatures import record_signatures

    live = record_signatures.signatures()
    assert live == record(live["version"])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM is installed here")
def test_the_installed_version_offers_everything() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.engine.vllm.async_llm import offered

    assert offered(AsyncLLM) == set(METHODS)
    assert calls.MEMORY not in METHODS
