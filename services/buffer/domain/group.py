"""Group: a prompt and its n trajectories, as a state machine.

Invariants:
  * pending -> running -> finished | failed -> sampled -> committed, or evicted from any state but sampled.
  * pending + running + finished trajectories = n while the group is not terminal.
  * It is running as soon as a trajectory was claimed or settled. It is pending again only when it was wholly re-issued:
    nothing runs, nothing finished, no partial output is kept.
  * A terminal group changes no trajectory any more.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from services.buffer.domain.outputs import NOTHING, Output, Payload
from services.buffer.domain.trajectory import Trajectory, TrajectoryState
from services.buffer.domain.variance import zero_variance


class GroupState(Enum):
    """Where a group stands; the first five numbers are those of the wire, the others are never shown."""

    PENDING = 1
    RUNNING = 2
    FINISHED = 3
    FAILED = 4
    SAMPLED = 5
    COMMITTED = 6
    EVICTED = 7


@dataclass(slots=True, eq=False)
class Group:
    """One prompt group. `started_at` is domain time, `added_at` unix time."""

    group_id: str
    sequence: int
    born: int
    trajectories: list[Trajectory]
    added_at: float
    prompt: Payload | None = None
    tags: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    state: GroupState = GroupState.PENDING
    failed: bool = False
    zero_variance: bool = False
    pending: int = 0
    finished: int = 0
    started_at: float = 0.0
    lease_id: str = ""
    error: str = ""
    _partials: int = 0
    # Trajectories below this one have been claimed or settled before; saves a list of fresh ones per group.
    _fresh: int = 0
    _reissued: dict[int, deque[int]] | None = field(default=None)

    def __post_init__(self) -> None:
        self.pending = len(self.trajectories)

    @property
    def size(self) -> int:
        """The group's n."""
        return len(self.trajectories)

    @property
    def running(self) -> int:
        """Trajectories that a worker holds; meaningful until the group is terminal."""
        return self.size - self.pending - self.finished

    @property
    def live(self) -> bool:
        """Whether trajectories can still settle."""
        return self.state is GroupState.PENDING or self.state is GroupState.RUNNING

    def take(self, limit: int, claim_id: str) -> tuple[int, list[int]]:
        """Hand out up to `limit` pending trajectories of one attempt; re-issued ones first, their output is older.

        Returns the attempt and the indices. The group must have a pending trajectory.
        """
        attempt, indices = self._take_reissued(limit)
        if not indices:
            attempt, indices = 1, self._take_fresh(limit)
        for index in indices:
            trajectory = self.trajectories[index]
            trajectory.state = TrajectoryState.RUNNING
            trajectory.claim_id = claim_id
            trajectory.done = None
        self.pending -= len(indices)
        self.state = GroupState.RUNNING
        return attempt, indices

    def _take_reissued(self, limit: int) -> tuple[int, list[int]]:
        while self._reissued:
            attempt = min(self._reissued)
            queue = self._reissued[attempt]
            indices: list[int] = []
            while queue and len(indices) < limit:
                index = queue.popleft()
                trajectory = self.trajectories[index]
                if trajectory.state is TrajectoryState.PENDING and trajectory.attempt == attempt:
                    indices.append(index)
            if not queue:
                del self._reissued[attempt]
            if indices:
                return attempt, indices
        return 1, []

    def _take_fresh(self, limit: int) -> list[int]:
        indices: list[int] = []
        while self._fresh < self.size and len(indices) < limit:
            trajectory = self.trajectories[self._fresh]
            if trajectory.state is TrajectoryState.PENDING and trajectory.attempt == 1:
                indices.append(self._fresh)
            self._fresh += 1
        return indices

    def settle(self, index: int, outputs: tuple[Output, ...]) -> None:
        """Finish one trajectory; the caller closes the group when all are finished."""
        trajectory = self.trajectories[index]
        if trajectory.state is TrajectoryState.PENDING:
            self.pending -= 1
        if trajectory.partial:
            self._partials -= 1
            trajectory.partial = ()
        trajectory.state = TrajectoryState.FINISHED
        trajectory.outputs = outputs
        trajectory.error = ""
        self.finished += 1
        self.state = GroupState.RUNNING

    def reissue(self, index: int, error: str, *, uses_attempt: bool, partial: tuple[Output, ...] = ()) -> None:
        """Make one unsettled trajectory pending under the next attempt; a new partial output replaces the kept one."""
        trajectory = self.trajectories[index]
        if trajectory.state is TrajectoryState.RUNNING:
            self.pending += 1
        trajectory.state = TrajectoryState.PENDING
        trajectory.attempt += 1
        trajectory.failures += uses_attempt
        trajectory.error = error
        if partial:
            self._partials += not trajectory.partial
            trajectory.partial = partial
        if self._reissued is None:
            self._reissued = {}
        self._reissued.setdefault(trajectory.attempt, deque()).append(index)

    def reissued(self) -> list[int]:
        """The re-issued trajectories in the order in which they are handed out."""
        queues = self._reissued or {}
        return [index for attempt in sorted(queues) for index in queues[attempt]]

    def put_back(self, reissued: Iterable[int]) -> None:
        """Count what its trajectories, filled in as they once were, make up."""
        self.pending = sum(trajectory.state is TrajectoryState.PENDING for trajectory in self.trajectories)
        self.finished = sum(trajectory.state is TrajectoryState.FINISHED for trajectory in self.trajectories)
        self._partials = sum(bool(trajectory.partial) for trajectory in self.trajectories)
        for index in reissued:
            if self._reissued is None:
                self._reissued = {}
            self._reissued.setdefault(self.trajectories[index].attempt, deque()).append(index)

    @property
    def has_partials(self) -> bool:
        """Whether output of earlier attempts is kept to be continued."""
        return self._partials > 0

    @property
    def wholly_reissued(self) -> bool:
        """Whether nothing of an earlier life is left: it may be born again."""
        return self.pending == self.size and not self._partials

    def finish(self, metric: str | None) -> None:
        """Make the group finished; trajectories that are not are dropped. `metric`: reward of the variance filter."""
        self._drop_unsettled("the group was closed without it")
        self.state = GroupState.FINISHED
        self.zero_variance = metric is not None and zero_variance(
            [output.rewards[metric] for output in self._outputs() if metric in output.rewards]
        )

    def fail(self, error: str) -> None:
        """Make the group failed, whatever its trajectories did; the finished ones keep their outputs."""
        self._drop_unsettled(error)
        self.state = GroupState.FAILED
        self.failed = True
        self.error = error
        self.zero_variance = False

    def _outputs(self) -> list[Output]:
        return [output for trajectory in self.trajectories for output in trajectory.outputs]

    def _drop_unsettled(self, error: str) -> None:
        for trajectory in self.trajectories:
            if trajectory.state is not TrajectoryState.FINISHED and trajectory.state is not TrajectoryState.FAILED:
                trajectory.state = TrajectoryState.FAILED
                trajectory.error = trajectory.error or error
        self.pending = 0
        self._reissued = None

    def lease(self, lease_id: str) -> None:
        """Sample takes it."""
        self.state = GroupState.SAMPLED
        self.lease_id = lease_id

    def come_back(self) -> None:
        """The lease ended without a commit."""
        self.state = GroupState.FAILED if self.failed else GroupState.FINISHED
        self.lease_id = ""

    def payloads(self) -> list[Payload]:
        """Everything it holds in a store: prompt, outputs, kept partial outputs."""
        held = [self.prompt] if self.prompt is not None else []
        for trajectory in self.trajectories:
            held += kept_payloads(trajectory.outputs)
            held += kept_payloads(trajectory.partial)
        return held


def kept_payloads(outputs: tuple[Output, ...]) -> list[Payload]:
    """The payloads of kept outputs."""
    return [output.payload for output in outputs if isinstance(output.payload, Payload)]
