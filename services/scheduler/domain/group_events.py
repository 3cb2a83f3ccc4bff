"""What happens to the groups of a run, as its buffer tells it.

Invariants: those of `events`, of which these are part.
"""

from dataclasses import dataclass
from enum import IntEnum


class GroupExit(IntEnum):
    """How a group left. Numbers are those of the buffer's GroupEventKind."""

    FAILED = 5
    SAMPLED = 6
    RETURNED = 7
    COMMITTED = 8
    EVICTED = 9


class EvictionReason(IntEnum):
    """Why a group left unused. Numbers are those of the buffer's EvictionReason."""

    STALE = 1
    ZERO_VARIANCE = 2
    FAILED = 3
    REQUESTED = 4


@dataclass(frozen=True, slots=True)
class GroupsAdded:
    """Prompts arrived in the training partition."""

    group_ids: tuple[str, ...]
    born_step: int
    group_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrajectoryFinished:
    """A member of a group settled. `on_hybrid`: where its end was generated, None when not known."""

    group_id: str
    index: int
    length: int
    replica_id: str
    on_hybrid: bool | None = None


@dataclass(frozen=True, slots=True)
class TrajectoriesReissued:
    """So many trajectories of a group wait for a worker again."""

    group_id: str
    trajectories: int


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """A group is complete. `on_hybrid`: where its last trajectory was generated, None when not known."""

    group_id: str
    lengths: tuple[int, ...]
    born_step: int
    on_hybrid: bool | None


@dataclass(frozen=True, slots=True)
class GroupLeft:
    """A group failed, was evicted, sampled, returned or committed."""

    group_id: str
    how: GroupExit
    reasons: tuple[EvictionReason, ...] = ()
