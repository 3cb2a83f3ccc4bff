"""What verl's own configuration finds under the names that docs/verl.md gives, and how a trainer ends."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the environment of `make test-verl`")
pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


def test_the_plugin_registers_the_trainer() -> None:
    """verl imports it while it is itself being imported, so one import too early would end every run at its start."""
    code = "from verl.trainer.ppo.v1 import get_trainer_cls; print(get_trainer_cls('turnout').__module__)"
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "turnout.integrations.verl.plugin"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert ran.stdout.split()[-1:] == ["turnout.integrations.verl._trainer"], ran.stderr[-2000:]


def test_the_names_in_verls_configuration_lead_to_the_adapter() -> None:
    from verl.utils.import_utils import load_class_from_fqn, load_extern_object

    from turnout.integrations.verl import AgentLoopManager, ReplayBuffer

    assert load_class_from_fqn("turnout.integrations.verl.AgentLoopManager", "AgentLoopManager") is AgentLoopManager
    assert load_extern_object("pkg://turnout.integrations.verl", "ReplayBuffer") is ReplayBuffer


class Closes:
    """Something that a trainer closes in the end, and that cannot be closed."""

    def __init__(self, name: str, closed: list[tuple[str, Any]]) -> None:
        self._name = name
        self._closed = closed

    def close(self, **given: Any) -> None:
        self._closed.append((self._name, given.get("reason")))
        raise ConnectionError(f"{self._name} is away")


def trainer_that(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> tuple[Any, list[tuple[str, Any]]]:
    """A trainer whose training ends like this, and what it has closed."""
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    from turnout.integrations.verl import Trainer

    def fit(self: Any, agent_loop_manager: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(PPOTrainerSeparateAsync, "fit", fit)
    closed: list[tuple[str, Any]] = []
    trainer = object.__new__(Trainer)
    trainer._setup_of_run = SimpleNamespace(run_id="r")
    trainer._hooks, trainer._engine = Closes("hooks", closed), Closes("engine", closed)
    trainer.replay_buffer = SimpleNamespace(index=Closes("index", closed))
    return trainer, closed


def test_what_ended_a_training_is_not_hidden_by_what_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory on the device, and the user saw that a channel was closed."""
    trainer, closed = trainer_that(monkeypatch, MemoryError("on the device"))
    with pytest.raises(MemoryError, match="on the device"):
        trainer.fit(None)
    # The run stays open for a trainer that resumes.
    assert closed == [("hooks", None), ("engine", None), ("index", None)]


def test_a_run_that_cannot_be_closed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs may still be lent."""
    trainer, closed = trainer_that(monkeypatch, None)
    with pytest.raises(ConnectionError):
        trainer.fit(None)
    assert closed == [("hooks", "finished"), ("engine", None), ("index", None)]
