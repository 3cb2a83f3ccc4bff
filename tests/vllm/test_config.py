"""The YAML file of an engine, and how the service takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.engine.backends import vllm_http, vllm_inproc
from services.engine.domain.spec import ReplicaSpec, Role
from services.engine.guarded.http import HttpPeers
from services.engine.settings import EngineSettings
from services.engine.vllm.config import VllmConfig
from services.runtime.clock import MonotonicClock
from services.runtime.errors import TurnoutError


def test_a_file_is_read_and_completed(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(
        "model: /m\ncpu: true\nengine_args: {max_model_len: 64, enforce_eager: false}\nenvironment: {A: b}\n"
    )
    config = VllmConfig.load(path)
    arguments = config.arguments()
    assert (arguments["model"], arguments["max_model_len"], arguments["enforce_eager"]) == ("/m", 64, False)
    assert arguments["worker_cls"].endswith(".SleepingCpuWorker")
    assert config.variables()["A"] == "b"
    gpu = VllmConfig(model="/m").arguments()
    assert gpu["enable_sleep_mode"]
    assert "worker_cls" not in gpu


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: /m\nmodle: x\n", "modle"),
        ("cpu: true\n", "model"),
        ("model: [\n", "not valid YAML"),
        ("- a\n", "engine.yaml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        VllmConfig.load(path)


def test_an_agents_replicas_run_on_vllm_where_it_is_configured() -> None:
    assert EngineSettings(agent=True, vllm_config=Path("/engine.yaml")).own_backend == "vllm-inproc"
    assert EngineSettings(agent=True).own_backend == "reference"


async def test_backends_say_what_they_lack(tmp_path: Path) -> None:
    clock = MonotonicClock()
    inproc = ReplicaSpec("r", Role.HYBRID, "vllm-inproc")
    with pytest.raises(TurnoutError, match="without vllm_config"):
        await vllm_inproc.open_backend(inproc, None, clock)
    with pytest.raises(TurnoutError, match="no endpoint"):
        await vllm_inproc.open_backend(ReplicaSpec("r", Role.HYBRID, "vllm-inproc", "http://x"), tmp_path, clock)
    for endpoint in ("", "localhost:8000", "ftp://x"):
        with pytest.raises(TurnoutError, match="needs the URL of a server"):
            await vllm_http.open_backend(ReplicaSpec("r", Role.HYBRID, "vllm-http", endpoint), clock, HttpPeers())
    with pytest.raises(TurnoutError) as caught:
        await vllm_http.open_backend(
            ReplicaSpec("r", Role.HYBRID, "vllm-http", "http://127.0.0.1:1"), clock, HttpPeers()
        )
    assert caught.value.reason == "ENGINE_UNREACHABLE"
