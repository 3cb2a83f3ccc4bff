"""What is known of a replica beyond what its engine tells, and so has to outlive the controller.

Invariant: it is a worst case. Whatever it says of weights held at every moment since it was made, also if the engine
was killed, or carried out a call whose answer never came.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from services.engine.domain.spec import Cache, Gpu, ReplicaSpec, Weights


class Intent(Enum):
    """What a replica is meant to do with requests."""

    OUT = "out"
    HOLD = "hold"
    SERVE = "serve"


class UpdateKind(Enum):
    """In what state a replica receives weights."""

    AWAKE = "awake"
    ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class Kept:
    """A replica's past.

    `must_load`: without weights of the run until a full update succeeds, whatever the engine says. `before_update` is
    what the weight memory held when the open update began, `released_kv` whether that update freed its KV memory.
    `engine_incarnation` and `declared_tags` are those of the last probe. `may_wake`: it was told to refill memory and
    has not answered, so it may still come to that; `may_sleep` is the same of freeing memory. `started_anew`: its
    engine is another one than was commanded last.
    """

    spec: ReplicaSpec
    weights: Weights
    weight_version: int
    adapter_version: int | None
    cache_version: int
    stale_caches: frozenset[Cache]
    intent: Intent
    lend_id: str
    update_id: str
    update_kind: UpdateKind
    unvacated: frozenset[Gpu]
    must_load: bool
    before_update: Weights
    released_kv: bool
    engine_incarnation: str
    declared_tags: frozenset[str]
    may_wake: bool
    may_sleep: bool
    started_anew: bool
