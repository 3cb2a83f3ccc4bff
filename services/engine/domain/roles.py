"""Which memory call does what on which role.

Invariants: a skip always has a reason that the answer carries; the level of a sleep is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.engine.domain.spec import ReplicaSpec, Role

BY_ROLE: Final = "ROLE_SKIPPED"
"""Reason of a skip: the call does not apply to the replica's role."""

BY_FREE_CACHE: Final = "FREE_CACHE_ENGINE_OFF"
"""Reason of a skip: the replica keeps its memory, by flag."""

BY_NODE_RANK: Final = "NOT_NODE_0"
"""Reason of a skip: node 0 of the replica does it for all nodes."""


def keeps_memory(spec: ReplicaSpec) -> str | None:
    """Why no memory call may reach this replica, or None. Such a replica is free once it is paused and drained."""
    if not spec.flags.free_cache_engine:
        return BY_FREE_CACHE
    if spec.flags.node_rank != 0:
        return BY_NODE_RANK
    return None


def sleep_skip(spec: ReplicaSpec) -> str | None:
    """Why Sleep and WakeUp are skipped, or None."""
    return BY_ROLE if spec.role is Role.STANDALONE else keeps_memory(spec)


def kv_skip(spec: ReplicaSpec) -> str | None:
    """Why ReleaseKvCache and ResumeKvCache are skipped, or None."""
    return BY_ROLE if spec.role is Role.COLOCATED else keeps_memory(spec)


def sleep_level(spec: ReplicaSpec, asked: int | None) -> int:
    """The level, 1 or 2, at which a replica sleeps; `asked` None is AUTO.

    COLOCATED always sleeps at 1. AUTO is 1 where the weights must survive (LoRA needs its base, MTP its draft head,
    an NPU cannot rebuild them), else 2.
    """
    if spec.role is Role.COLOCATED:
        return 1
    if asked is not None:
        return asked
    flags = spec.flags
    return 1 if flags.mtp_rollout or flags.lora_as_adapter or flags.npu else 2


def wake_tags(spec: ReplicaSpec, declared: Iterable[str], asked: frozenset[str] | None) -> frozenset[str]:
    """The tags WakeUp is about; None is all. COLOCATED wakes all of them."""
    if asked is None or spec.role is Role.COLOCATED:
        return frozenset(declared)
    return asked
