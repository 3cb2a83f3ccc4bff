"""The calls a replica's engine can be asked for, as values.

Invariant: the domain only ever names calls; whoever carries them out tells the domain afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.domain.spec import Cache, PauseMode


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop scheduling."""

    mode: PauseMode
    clear_cache: bool = True


@dataclass(frozen=True, slots=True)
class Drain:
    """End what is left in a paused engine, and wait until nothing is."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free all memory that is still resident."""

    level: int


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Refill memory."""

    tags: frozenset[str]


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """Free KV memory, keeping everything else."""


@dataclass(frozen=True, slots=True)
class ResumeKv:
    """Refill KV memory."""


@dataclass(frozen=True, slots=True)
class ResetCaches:
    """Empty caches."""

    caches: frozenset[Cache]
    reset_running_requests: bool = False
    reset_connectors: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """Start scheduling, unless the engine does already."""


Call = Pause | Drain | Sleep | WakeUp | ReleaseKv | ResumeKv | ResetCaches | Resume


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to be called for a transition, in order.

    `skipped` is the reason why nothing applies; without calls and without a reason the replica already is where it
    should be. `method` tells which way was taken where there is a choice.
    """

    calls: tuple[Call, ...] = ()
    skipped: str = ""
    method: str = ""
