"""The enums of the contract and their domain counterparts.

Invariants: both directions come from one table, so they cannot disagree; a number that the contract does not know is
INVALID_ARGUMENT naming the field, since another client may be newer than this service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from services.engine.domain.kept import UpdateKind
from services.engine.domain.operations import OperationState, OutcomeKind
from services.engine.domain.requests import Finish
from services.engine.domain.spec import Cache, Health, PauseMode, Role, Route, Weights
from services.runtime.errors import invalid_argument
from turnout.engine.v1 import engine_pb2 as pb

P = TypeVar("P", bound=int)
D = TypeVar("D")


class EnumTable(Generic[P, D]):
    """One enum, both ways."""

    def __init__(self, pairs: Mapping[P, D]) -> None:
        self._to_domain = dict(pairs)
        self._to_proto = {domain: proto for proto, domain in pairs.items()}

    def read(self, field: str, value: P, default: D | None = None) -> D:
        """The domain value; UNSPECIFIED is the default, if there is one."""
        if value == 0 and default is not None:
            return default
        found = self._to_domain.get(value)
        if found is None:
            raise invalid_argument(field, f"{field} has no valid value", value=int(value))
        return found

    def write(self, value: D) -> P:
        """The number on the wire."""
        return self._to_proto[value]


ROLES = EnumTable(
    {
        pb.REPLICA_ROLE_HYBRID: Role.HYBRID,
        pb.REPLICA_ROLE_STANDALONE: Role.STANDALONE,
        pb.REPLICA_ROLE_COLOCATED: Role.COLOCATED,
    }
)
WEIGHTS_STATES = EnumTable(
    {
        pb.WEIGHTS_STATE_INTACT: Weights.INTACT,
        pb.WEIGHTS_STATE_DISCARDED: Weights.DISCARDED,
        pb.WEIGHTS_STATE_HALF_UPDATED: Weights.HALF_UPDATED,
    }
)
HEALTHS = EnumTable(
    {
        pb.REPLICA_HEALTH_HEALTHY: Health.HEALTHY,
        pb.REPLICA_HEALTH_UNRESPONSIVE: Health.UNRESPONSIVE,
        pb.REPLICA_HEALTH_DEAD: Health.DEAD,
    }
)
ROUTES = EnumTable(
    {pb.ROUTE_STATE_OUT: Route.OUT, pb.ROUTE_STATE_HELD: Route.HELD, pb.ROUTE_STATE_SERVING: Route.SERVING}
)
LEVELS = EnumTable({pb.SLEEP_LEVEL_ONE: 1, pb.SLEEP_LEVEL_TWO: 2, pb.SLEEP_LEVEL_UNSPECIFIED: 0})
PAUSE_MODES = EnumTable(
    {pb.PAUSE_MODE_ABORT: PauseMode.ABORT, pb.PAUSE_MODE_WAIT: PauseMode.WAIT, pb.PAUSE_MODE_KEEP: PauseMode.KEEP}
)
CACHES = EnumTable(
    {
        pb.CACHE_KIND_PREFIX: Cache.PREFIX,
        pb.CACHE_KIND_MULTIMODAL: Cache.MULTIMODAL,
        pb.CACHE_KIND_ENCODER: Cache.ENCODER,
    }
)
WEIGHTS_ORIGINS = EnumTable({pb.WEIGHTS_ORIGIN_LOADED: True, pb.WEIGHTS_ORIGIN_NONE: False})
OPERATION_STATES = EnumTable(
    {
        pb.OPERATION_STATE_RUNNING: OperationState.RUNNING,
        pb.OPERATION_STATE_SUCCEEDED: OperationState.SUCCEEDED,
        pb.OPERATION_STATE_PARTIAL: OperationState.PARTIAL,
    }
)
OUTCOME_KINDS = EnumTable(
    {
        pb.OUTCOME_KIND_PENDING: OutcomeKind.PENDING,
        pb.OUTCOME_KIND_DONE: OutcomeKind.DONE,
        pb.OUTCOME_KIND_SKIPPED: OutcomeKind.SKIPPED,
        pb.OUTCOME_KIND_FAILED: OutcomeKind.FAILED,
    }
)
UPDATE_KINDS = EnumTable({pb.UPDATE_KIND_AWAKE: UpdateKind.AWAKE, pb.UPDATE_KIND_ASLEEP: UpdateKind.ASLEEP})
KEEPS_IN_FLIGHT = EnumTable({pb.IN_FLIGHT_ABORT: False, pb.IN_FLIGHT_KEEP_RECOMPUTE: True})
FINISHES = EnumTable(
    {
        pb.FINISH_REASON_STOP: Finish.STOP,
        pb.FINISH_REASON_LENGTH: Finish.LENGTH,
        pb.FINISH_REASON_ABORT: Finish.ABORT,
    }
)


def read_level(value: pb.SleepLevel.ValueType) -> int | None:
    """The level, None for AUTO."""
    if value in (pb.SLEEP_LEVEL_UNSPECIFIED, pb.SLEEP_LEVEL_AUTO):
        return None
    return LEVELS.read("level", value)
