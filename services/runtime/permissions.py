"""Who may make which call: the one table.

Invariants: every call of every service stands here, and one that does not is nobody's; an operator may make every call;
health is open to all and needs no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """What the bearer of a token is."""

    TRAINER = "trainer"
    """A training job: it owns its run, its epoch and its GPUs."""
    WORKER = "worker"
    """A rollout worker: claims prompts, generates, hands in trajectories."""
    READER = "reader"
    """Who only looks: dashboards, `turnout status`, `top`, `report`."""
    OPERATOR = "operator"
    """A person on call: everything."""
    SERVICE = "service"
    """The scheduler towards buffer and engine controller, the controller towards its agents."""


Roles = frozenset[Role]

_OPERATOR: Final = frozenset({Role.OPERATOR})
_ANY: Final = frozenset(Role)
_TRAINER: Final = _OPERATOR | {Role.TRAINER}
_WORKER: Final = _OPERATOR | {Role.WORKER}
_JOB: Final = _TRAINER | _WORKER
_OWNER: Final = _TRAINER | {Role.SERVICE}
_GENERATING: Final = _JOB | {Role.SERVICE}

_BUFFER: Final[Mapping[str, Roles]] = {
    "CreateRun": _TRAINER,
    "GetRun": _ANY,
    "UpdateRun": _TRAINER,
    "DeleteRun": _TRAINER,
    "ListRuns": _ANY,
    "OpenEpoch": _OWNER,
    "RenewEpoch": _OWNER,
    "AddGroups": _TRAINER,
    "ClaimGroups": _WORKER,
    "SetIntake": _OWNER,
    "RenewClaims": _WORKER,
    "FinishTrajectories": _WORKER,
    "FinishStream": _WORKER,
    "FailTrajectories": _WORKER,
    "FinishGroup": _WORKER,
    "FailGroup": _WORKER,
    "ReportProgress": _WORKER,
    "GetSampleableCount": _ANY,
    "WatchDepth": _ANY,
    "WatchGroups": _ANY,
    "WaitForSampleable": _OWNER,
    "Sample": _TRAINER,
    "CommitSample": _TRAINER,
    "ReleaseSample": _TRAINER,
    "RenewSample": _TRAINER,
    "DeclineRefill": _TRAINER,
    "EvictGroups": _TRAINER,
    "PutPayload": _JOB,
    "ReleasePayload": _JOB,
    "GetPayloads": _JOB,
    "WatchReleases": _TRAINER,
    "AckReleases": _TRAINER,
    "GetGroup": _ANY,
    "ListGroups": _ANY,
    "GetLedger": _ANY,
    "Checkpoint": _OWNER,
    "Restore": _OWNER,
    "ListCheckpoints": _ANY,
    "VerifyCheckpoint": _TRAINER,
    "DeleteCheckpoint": _TRAINER,
}

_ENGINE: Final[Mapping[str, Roles]] = {
    "OpenEpoch": _OWNER,
    "Register": _TRAINER,
    "Deregister": _TRAINER,
    "ListReplicas": _ANY,
    "WatchReplicas": _ANY,
    "Sleep": _OWNER,
    "WakeUp": _OWNER,
    "ReleaseKvCache": _OWNER,
    "ResumeKvCache": _OWNER,
    "Pause": _OWNER,
    "Resume": _OWNER,
    "ResetCaches": _OWNER,
    "Abort": _OWNER,
    "CollectiveRpc": _OWNER,
    "BeginLend": _OWNER,
    "FinishLend": _OWNER,
    "AbortLend": _OWNER,
    "Reclaim": _OWNER,
    "BeginWeightUpdate": _OWNER,
    "UpdateWeights": _OWNER,
    "CommitWeightUpdate": _OWNER,
    "AbortWeightUpdate": _OWNER,
    "ExchangeRendezvous": _OWNER,
    "ReportVacated": _OWNER,
    "Generate": _GENERATING,
    "WatchRoutes": _ANY,
    "WatchProgress": _ANY,
    "GetProgress": _ANY,
    "GetOperation": _ANY,
    "ListOperations": _ANY,
}

_SCHEDULER: Final[Mapping[str, Roles]] = {
    "OpenRun": _TRAINER,
    "CloseRun": _TRAINER,
    "GetRun": _ANY,
    "ListRuns": _ANY,
    "UpdateRun": _TRAINER,
    "BeginStep": _TRAINER,
    "PrepareStep": _TRAINER,
    "BeginSample": _TRAINER,
    "EndSample": _TRAINER,
    "EndStep": _TRAINER,
    "BeginValidation": _TRAINER,
    "EndValidation": _TRAINER,
    "CompleteLend": _TRAINER,
    "AbandonLend": _TRAINER,
    "Save": _TRAINER,
    "Heartbeat": _TRAINER,
    "WatchRun": _ANY,
}

_REFLECTION: Final[Mapping[str, Roles]] = {"ServerReflectionInfo": _OPERATOR}

_CHANNELZ: Final[Mapping[str, Roles]] = {
    "GetTopChannels": _OPERATOR,
    "GetServers": _OPERATOR,
    "GetServer": _OPERATOR,
    "GetServerSockets": _OPERATOR,
    "GetChannel": _OPERATOR,
    "GetSubchannel": _OPERATOR,
    "GetSocket": _OPERATOR,
}

_SERVICES: Final[Mapping[str, Mapping[str, Roles]]] = {
    "turnout.buffer.v1.ReplayBuffer": _BUFFER,
    "turnout.engine.v1.EngineController": _ENGINE,
    "turnout.scheduler.v1.SwitchScheduler": _SCHEDULER,
    "grpc.reflection.v1alpha.ServerReflection": _REFLECTION,
    "grpc.channelz.v1.Channelz": _CHANNELZ,
}

PERMISSIONS: Final[Mapping[str, Roles]] = {
    f"/{service}/{call}": roles for service, calls in _SERVICES.items() for call, roles in calls.items()
}
"""Roles by the full name of a call."""
