"""What every test gets: an environment without settings of Turnout, and logs that go nowhere."""

from __future__ import annotations

import os

import pytest
import structlog
from hypothesis import settings

# CI tries the same examples every time, so that a red run is the change's fault; at a desk every run tries others.
settings.register_profile("ci", derandomize=True, database=None)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _no_settings_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("TURNOUT_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _quiet_logs() -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
