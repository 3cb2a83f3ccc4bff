"""What goes into a policy (events) and what comes out (decisions).

Invariants: values are frozen; `at` and every other time are seconds of the run's own clock, durations included; token
counts are of generated tokens unless a field says prompt; importing this module loads the standard library only.

How the trainer's calls become events: BeginStep is StepBegan; the first attempt of BeginSample is StarvationBegan, with
the depth of that moment, also when the mini-batch is there at once; EndSample is StarvationEnded, with the trainer's
wait, then MiniBatchBegan; the next BeginSample or EndStep is MiniBatchEnded; EndStep is StepEnded. Each happens once:
whoever feeds a policy leaves repeats out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from services.scheduler.policies.config import PolicyConfig, RunConfig, SwitchConfig

__all__ = [
    "Action",
    "Decision",
    "DepthObserved",
    "Event",
    "GroupFinished",
    "GroupsAdded",
    "LendDone",
    "MiniBatchBegan",
    "MiniBatchEnded",
    "NewGroup",
    "Placement",
    "Point",
    "PolicyConfig",
    "Pool",
    "ReclaimDone",
    "ReplicaCounters",
    "RequestKey",
    "RequestProgress",
    "RequestState",
    "RunConfig",
    "RunOpened",
    "StarvationBegan",
    "StarvationEnded",
    "StepBegan",
    "StepEnded",
    "SwitchConfig",
    "SyncDone",
    "TopologyChanged",
]


class Point(Enum):
    """Where a decision is asked for."""

    STEP_BEGIN = "step_begin"
    """BeginStep, after StepBegan and, while GPUs are lent, DepthObserved of that step."""
    WAITING = "waiting"
    """While the trainer waits for rollouts and GPUs are lent: at every arrival, and at `recheck_at`."""
    SAMPLE_BEGIN = "sample_begin"
    """BeginSample, after StarvationBegan."""
    STEP_END = "step_end"
    """EndStep of step s, after StepEnded(s) and DepthObserved(s + 1)."""


class Action(Enum):
    """What to do with the hybrid GPUs."""

    KEEP = "keep"
    """Leave them where they are."""
    LEND = "lend"
    """Give them to generation."""
    RECLAIM = "reclaim"
    """Take them back for training."""


class Pool(Enum):
    """Which replicas a request runs on."""

    HYBRID = "hybrid"
    STANDALONE = "standalone"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """One trajectory of a group: `trajectory` counts from 0 to the group's size - 1."""

    group: str
    trajectory: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where running requests go at a lend. A request in neither list is placed by the engine."""

    hybrid: tuple[RequestKey, ...] = ()
    standalone: tuple[RequestKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An answer, with everything it rests on.

    predicted_wait_s: how long the trainer will wait for rollouts if the answer is followed; None when not known.
    reason: one sentence for people.
    numbers: every number used, under plain names; a number that is not known yet is absent.
    recheck_at: ask again then, though nothing arrived; None when arrivals are enough.
    threshold: sampleable groups at which GPUs come back in this step; None when the policy has no such number.
    """

    action: Action
    reason: str
    placement: Placement | None = None
    predicted_wait_s: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    recheck_at: float | None = None
    threshold: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, at `at` seconds of the run's clock."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened(Event):
    """The run was opened, opened again by a newer epoch, or re-configured. What was learned before stays.

    goes_on: it was re-configured between two steps, and whatever runs goes on.
    """

    config: PolicyConfig
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChanged(Event):
    """GPUs and healthy replicas of both pools, from now on."""

    hybrid_gpus: int
    standalone_gpus: int
    hybrid_replicas: int
    standalone_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGroup:
    """A group on its way in: `size` trajectories, `prompt_tokens` None when unknown."""

    group: str
    size: int
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsAdded(Event):
    """Training groups were admitted at `step`."""

    step: int
    groups: tuple[NewGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """One request as its engine last saw it.

    tokens: generated so far, over all turns and segments, in the run's unit; final when `finished`.
    prompt_tokens: None when unknown. replica, pool: where it runs or finished; empty and None while it is parked or a
    tool works for it, and where its worker alone tells of it.
    pool: None too where the replica's pool is not known.
    """

    key: RequestKey
    tokens: int
    replica: str
    pool: Pool | None
    prompt_tokens: int | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress(Event):
    """Progress of running requests and of those finished since the last message.

    covered_share: share in [0, 1] of the running requests that the controller can see.
    """

    requests: tuple[RequestState, ...]
    covered_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFinished(Event):
    """All trajectories of a group settled: their lengths, and the pool that finished the last one (None: unknown)."""

    group: str
    lengths: tuple[int, ...]
    pool: Pool | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounters(Event):
    """One replica's counters. `decoded_tokens` is cumulative; `prefill_tokens_per_s` None when not measured."""

    replica: str
    pool: Pool
    decoded_tokens: int
    running_requests: int
    prefill_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthObserved(Event):
    """The buffer's depth, counted for `step`.

    sampleable: groups that could be sampled. in_flight: groups pending or running. unpaid_credits: groups evicted whose
    replacement has not been added.
    """

    step: int
    sampleable: int
    in_flight: int
    unpaid_credits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegan(Event):
    """The trainer began `step`: waits count from zero again."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StarvationBegan(Event):
    """The trainer asked for mini-batch `mini_batch` (from 0) and has nothing to train on; `sampleable` groups exist."""

    step: int
    mini_batch: int
    sampleable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StarvationEnded(Event):
    """The trainer got its mini-batch after waiting `wait_s`, by its own measure."""

    step: int
    mini_batch: int
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchBegan(Event):
    """Training on a mini-batch began."""

    step: int
    mini_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchEnded(Event):
    """Training on a mini-batch ended; `tokens` trained, None when the trainer does not say."""

    step: int
    mini_batch: int
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded(Event):
    """The trainer ended `step`."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LendDone(Event):
    """Hybrid GPUs generate. `cost_s` is BeginLend + hybrid update + FinishLend, without the standalone update.

    counted: false keeps the cost out of the averages (the lend at the run's start, validation).
    """

    cost_s: float
    counted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimDone(Event):
    """Hybrid GPUs are free for training again, after `cost_s`. Every reclaim counts while switching is on."""

    cost_s: float
    counted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncDone(Event):
    """A standalone weight update took `cost_s`."""

    cost_s: float
    counted: bool = True
