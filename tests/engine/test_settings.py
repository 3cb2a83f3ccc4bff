"""What the program can be told, and what it refuses to be told."""

from __future__ import annotations

from typing import Any

import pytest

from services.engine.backends.registry import reference_config
from services.engine.domain.spec import Role
from services.engine.reference.decode import Curve
from services.engine.reference.model import LengthLaw
from services.engine.settings import EngineSettings, OwnReplica
from services.runtime.config import ConfigError, load_settings


def test_replicas_of_an_agent() -> None:
    """Ids are opaque: only the last colon parts them from the role."""
    settings = EngineSettings(agent=True, replica=["a:b:hybrid", "组-0:standalone"])
    assert settings.own_replicas == [OwnReplica("a:b", Role.HYBRID), OwnReplica("组-0", Role.STANDALONE)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"agent": True, "replica": ["h0"]}, "not ID:ROLE"),
        ({"agent": True, "replica": [":hybrid"]}, "not ID:ROLE"),
        ({"agent": True, "replica": ["h0:hibrid"]}, "unknown role 'hibrid'; roles are hybrid, standalone, colocated"),
        ({"agent": True, "replica": ["h0:hybrid", "h0:standalone"]}, "given twice"),
        ({"replica": ["h0:hybrid"]}, "add --agent"),
        ({"decode_base": 0}, "decode_base"),
        ({"probe_interval": -1}, "probe_interval"),
    ],
)
def test_wrong_settings_say_what_is_wrong(given: dict[str, Any], says: str) -> None:
    """One line for a person, before anything listens."""
    with pytest.raises(ConfigError) as caught:
        load_settings(EngineSettings, flags=given)
    assert says in caught.value.problems[0]


def test_lists_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers are configured by variables."""
    monkeypatch.setenv("TURNOUT_ENGINE_AGENT", "true")
    monkeypatch.setenv("TURNOUT_ENGINE_REPLICA", "a:hybrid, b:standalone")
    settings = load_settings(EngineSettings)
    assert [own.replica_id for own in settings.own_replicas] == ["a", "b"]


def test_the_defaults_are_the_calibrated_constants() -> None:
    """The demo and the simulator have to mean the same engine."""
    config = reference_config(EngineSettings())
    assert config.curve == Curve(0.00975, 0.000078, 60_000.0)
    assert config.model.law == LengthLaw(13_000.0, 0.75, 0.85)
