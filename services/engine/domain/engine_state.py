"""What an engine tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.engine.domain.spec import PauseMode, Weights

NATIVE_RELEASE: Final = "release_kv_cache"
"""Capability of engines that can free KV memory alone."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What a probe of an engine told.

    `weights`, `weight_version`, `memory_bytes` (in use) and `tag_bytes` (behind each tag) are None where the engine
    cannot tell. `incarnation` differs between two processes of an engine; empty where it cannot tell.
    """

    declared_tags: frozenset[str]
    resident_tags: frozenset[str]
    sleep_level: int = 0
    paused: bool = False
    pause_mode: PauseMode | None = None
    running: int = 0
    capabilities: frozenset[str] = frozenset()
    weights: Weights | None = None
    weight_version: int | None = None
    adapter_version: int | None = None
    memory_bytes: int | None = None
    tag_bytes: Mapping[str, int] | None = None
    incarnation: str = ""
