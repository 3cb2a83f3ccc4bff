"""Turnout in a training run of verl 0.9.1, set up through verl's own configuration; see docs/verl.md.

Importing this imports nothing of verl until a name is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "AgentLoopManager": "turnout.integrations.verl._agent_loop",
    "AgentLoopWorker": "turnout.integrations.verl._agent_loop",
    "ReplayBuffer": "turnout.integrations.verl._buffer",
    "Trainer": "turnout.integrations.verl._trainer",
    "VerlSetup": "turnout.integrations.verl._setup",
}

__all__ = ["AgentLoopManager", "AgentLoopWorker", "ReplayBuffer", "Trainer", "VerlSetup"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
