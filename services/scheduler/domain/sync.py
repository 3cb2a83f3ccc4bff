"""A weight update as the trainer tells of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sync:
    """One update. In domain seconds: how long it took, and how long no replica served; None where that is not told."""

    seconds: float
    tokens_recomputed: int | None = None
    blackout_seconds: float | None = None
