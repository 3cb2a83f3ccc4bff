"""The vLLM bench runs on a real engine, and its figures are those that are asked for."""

from __future__ import annotations

import pytest

from services.bench import vllm

CALLS = ("pause", "resume", "sleep", "wake", "reset")


@pytest.mark.timeout(1200)
async def test_every_figure_is_measured_beside_the_engine_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that nobody can measure again is none; and after the last one no process is left."""
    monkeypatch.setattr(vllm, "TOKENS", 40)
    monkeypatch.setattr(vllm, "SHORT_TOKENS", 16)
    results = {result.name: result async for result in vllm.measure(1)}
    limited = {f"vllm_{way}{call}" for way in ("", "controller_") for call in CALLS}
    limited |= {"vllm_generate_backend", "vllm_generate_controller", "vllm_idle_death"}
    assert {name for name, result in results.items() if result.limit is not None} == limited
    assert all(result.value > 0 for result in results.values())
    assert all(result.baseline > 0 for name, result in results.items() if name != "vllm_idle_death")
