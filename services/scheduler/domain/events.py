"""What happens in a run, as the run's event stream tells it.

Invariants: an event is frozen; class and field names are those of events.proto, and enum numbers are the contract's, so
that translating one needs no table; times are seconds of the run's own clock unless a name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from services.scheduler.domain.group_events import (
    GroupFinished,
    GroupLeft,
    GroupsAdded,
    TrajectoriesReissued,
    TrajectoryFinished,
)


class Mode(IntEnum):
    """Who has the hybrid GPUs."""

    TRAINER = 1
    LENDING = 2
    ROLLOUT = 3
    RECLAIMING = 4


class LendKind(IntEnum):
    """Why GPUs are lent."""

    INIT = 1
    STEP_END = 2
    WITHIN_STEP = 3
    VALIDATION = 4


class DecisionPoint(IntEnum):
    """When a policy was asked."""

    STEP_BEGIN = 1
    WAITING = 2
    SAMPLE_BEGIN = 3
    STEP_END = 4


class DecisionAction(IntEnum):
    """What a policy wants."""

    KEEP = 1
    LEND = 2
    RECLAIM = 3


class Transition(IntEnum):
    """A move of GPUs."""

    LEND = 1
    RECLAIM = 2
    ABORT_LEND = 3


class RouteState(IntEnum):
    """What new requests do with a replica. Numbers are those of the engine's RouteState."""

    OUT = 1
    HELD = 2
    SERVING = 3


@dataclass(frozen=True, slots=True)
class RunOpened:
    """The run was opened; `resumed`: what was known of its groups is void."""

    epoch: int
    step: int
    config_json: str
    resumed: bool = False
    checkpoint_id: str = ""


@dataclass(frozen=True, slots=True)
class RunUpdated:
    """Configuration or policy changed, from this step on."""

    config_json: str


@dataclass(frozen=True, slots=True)
class ValidationBegan:
    """Validation of `step` begins."""

    step: int


@dataclass(frozen=True, slots=True)
class ValidationEnded:
    """Validation of `step` is over."""

    step: int


@dataclass(frozen=True, slots=True)
class RunClosed:
    """The run was closed."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """Progress of one running trajectory, in the run's unit.

    `replica_id` is empty and `on_hybrid` None while it is parked or between two turns, and where its worker alone tells
    of it. `on_hybrid` is None too of a replica that is neither hybrid nor standalone.
    """

    group_id: str
    index: int
    done: int
    replica_id: str
    on_hybrid: bool | None


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """A reading of everything that runs."""

    requests: tuple[RunningRequest, ...]
    covered_share: float


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """One replica's cumulative counters. `hybrid` is None of one that is neither hybrid nor standalone."""

    replica_id: str
    hybrid: bool | None
    decoded_tokens: int
    prefilled_tokens: int
    prefill_seconds: float
    running: int
    route: RouteState
    delivered_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaCounters:
    """A reading of all replicas."""

    replicas: tuple[ReplicaReading, ...]


@dataclass(frozen=True, slots=True)
class DepthObserved:
    """A reading of the buffer, counted for `step`."""

    step: int
    sampleable: int
    in_flight: int
    unpaid_credits: int


@dataclass(frozen=True, slots=True)
class StepBegan:
    """BeginStep was called."""

    step: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """EndStep was called."""

    step: int


@dataclass(frozen=True, slots=True)
class MiniBatchBegan:
    """The trainer asks for a mini-batch; `sampleable` groups exist at that moment."""

    step: int
    mini_batch: int
    sampleable: int


@dataclass(frozen=True, slots=True)
class MiniBatchEnded:
    """The trainer has it, after waiting `wait_seconds` by its own measure."""

    step: int
    mini_batch: int
    wait_seconds: float
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StarvationBegan:
    """The trainer waits with nothing to train on."""

    step: int


@dataclass(frozen=True, slots=True)
class StarvationEnded:
    """It goes on."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LendDone:
    """Hybrid replicas serve."""

    lend_id: str
    kind: LendKind
    cost_seconds: float
    counted: bool


@dataclass(frozen=True, slots=True)
class LendAbandoned:
    """A lend came to nothing."""

    lend_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReclaimDone:
    """The trainer has its GPUs."""

    cost_seconds: float
    counted: bool


@dataclass(frozen=True, slots=True)
class SyncDone:
    """Weights reached replicas."""

    hybrid: bool
    seconds: float
    weight_version: int
    tokens_recomputed: int | None = None
    blackout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TopologyChanged:
    """Healthy replicas and their GPUs."""

    hybrid_replicas: int
    standalone_replicas: int
    hybrid_gpus: int
    standalone_gpus: int


@dataclass(frozen=True, slots=True)
class ModeChanged:
    """The reported mode changed; `before` is `from` in the proto, a word Python keeps for itself."""

    before: Mode
    to: Mode
    lend_id: str


@dataclass(frozen=True, slots=True)
class DecisionMade:
    """A decision with everything it rests on; of a placement, how many running requests it wants in each pool."""

    point: DecisionPoint
    step: int
    action: DecisionAction
    policy: str
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    predicted_wait_seconds: float | None = None
    threshold: int | None = None
    recheck_at: float | None = None
    placed_on_hybrid: int = 0
    placed_on_standalone: int = 0


@dataclass(frozen=True, slots=True)
class TransitionFailed:
    """A transition did not succeed."""

    transition: Transition
    reason: str
    message: str
    operation_id: str


@dataclass(frozen=True, slots=True)
class Saved:
    """Save succeeded."""

    step: int
    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of a step as they were returned to the trainer."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LendGoodput:
    """What a lend brought, told when the step is over in which the trainer had its GPUs back.

    decoded_tokens: on its replicas. delivered_tokens: of these, what came to their requests. lost_seconds: waiting and
    switching from the order to lend to that step's end. See `domain.goodput` for the other seconds.
    """

    lend_id: str
    decoded_tokens: int
    delivered_tokens: int
    switch_seconds: float
    lost_seconds: float
    saved_at_most_seconds: float | None = None
    predicted_alone_seconds: float | None = None
    gained_seconds: float | None = None


Happening = (
    RunOpened
    | RunUpdated
    | ValidationBegan
    | ValidationEnded
    | TrajectoriesReissued
    | RunClosed
    | GroupsAdded
    | TrajectoryFinished
    | GroupFinished
    | GroupLeft
    | RequestProgress
    | ReplicaCounters
    | DepthObserved
    | StepBegan
    | StepEnded
    | MiniBatchBegan
    | MiniBatchEnded
    | StarvationBegan
    | StarvationEnded
    | LendDone
    | LendAbandoned
    | ReclaimDone
    | SyncDone
    | TopologyChanged
    | ModeChanged
    | DecisionMade
    | TransitionFailed
    | Saved
    | StepMetrics
    | LendGoodput
)
"""Everything that can happen."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened, with its place in the run.

    sequence: from 1, without gaps. at: seconds of the run's clock. time: unix seconds.
    """

    sequence: int
    at: float
    time: float
    event: Happening
