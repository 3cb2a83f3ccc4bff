"""Group: a prompt and its n trajectories, as a state machine.

Invariants:
  * pending -> running -> finished | failed -> sampled -> committed, or evicted from any state but sampled.
  * pending + running + finished trajectories = n while the group is not terminal.
  * It is running as soon as a trajectory was claimed or settled. It is pending again only when it was wholly re-issued:
    nothing runs, nothing finished, no partial output is kept.
  * A terminal group changes no trajectory any more: of each it keeps the outputs, and what else is remarkable.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from services.buffer.domain.outputs import NOTHING, Outputs, Payload
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


# Shared by the terminal groups all of whose trajectories finished at the first attempt.
_PLAIN = Trajectory(TrajectoryState.FINISHED)
NO_ODD: Mapping[int, Trajectory] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Group:
    """One prompt group of `size` trajectories. `started_at` is domain time, `added_at` unix time.

    Until it is terminal its trajectories are `members`. Then `results` are the encoded outputs of the finished ones,
    joined, `placed` their payloads with index and position, `small` the encoded payloads that stay here, of
    `small_bytes` together, `versions` the smallest and largest weight version of each of which they are known, and
    `odd` those trajectories, without their outputs, that did not just finish at the first attempt. A hundred thousand
    terminal groups are what a full buffer holds, so they are as few objects as may be.
    """

    group_id: str
    sequence: int
    born: int
    members: Sequence[Trajectory]
    added_at: float
    size: int = 0
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
    results: bytes = b""
    placed: tuple[tuple[int, int, Payload], ...] = ()
    small: bytes = b""
    small_bytes: int = 0
    versions: tuple[tuple[int, int], ...] = ()
    odd: Mapping[int, Trajectory] = field(default_factory=lambda: NO_ODD)
    # What prompt it is, if that is not its id.
    prompt_id: str = ""
    # The trace it was added in. Forgotten with the process: a trace that old is over.
    trace: str = ""
    # Length of the longest trajectory that finished, whatever became of the group.
    longest: int = 0
    _partials: int = 0
    # Trajectories below this one have been claimed or settled before; saves a list of fresh ones per group.
    _fresh: int = 0
    _reissued: dict[int, deque[int]] | None = field(default=None)

    def __post_init__(self) -> None:
        if self.members:
            self.pending = self.size = len(self.members)

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """All trajectories; of a terminal group without their outputs."""
        return self.members or [self.odd.get(index, _PLAIN) for index in range(self.size)]

    def trajectory(self, index: int) -> Trajectory:
        """One of them."""
        return self.members[index] if self.members else self.odd.get(index, _PLAIN)

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
            trajectory = self.members[index]
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
                trajectory = self.members[index]
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
            trajectory = self.members[self._fresh]
            if trajectory.state is TrajectoryState.PENDING and trajectory.attempt == 1:
                indices.append(self._fresh)
            self._fresh += 1
        return indices

    def settle(self, index: int, outputs: Outputs) -> None:
        """Finish one trajectory; the caller closes the group when all are finished."""
        trajectory = self.members[index]
        if trajectory.state is TrajectoryState.PENDING:
            self.pending -= 1
        if trajectory.partial is not None:
            self._partials -= 1
            trajectory.partial = None
        trajectory.state = TrajectoryState.FINISHED
        trajectory.outputs = outputs
        trajectory.error = ""
        self.longest = max(self.longest, outputs.length)
        self.finished += 1
        self.state = GroupState.RUNNING

    def reissue(self, index: int, error: str, *, uses_attempt: bool, partial: Outputs | None = None) -> None:
        """Make one unsettled trajectory pending under the next attempt; a new partial output replaces the kept one."""
        trajectory = self.members[index]
        if trajectory.state is TrajectoryState.RUNNING:
            self.pending += 1
        trajectory.state = TrajectoryState.PENDING
        trajectory.attempt += 1
        trajectory.failures += uses_attempt
        trajectory.error = error
        if partial is not None:
            self._partials += trajectory.partial is None
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
        if not self.members:
            unfinished = [odd for odd in self.odd.values() if odd.state is not TrajectoryState.FINISHED]
            self.finished = self.size - len(unfinished)
            return
        self.pending = sum(trajectory.state is TrajectoryState.PENDING for trajectory in self.members)
        self.finished = sum(trajectory.state is TrajectoryState.FINISHED for trajectory in self.members)
        self._partials = sum(trajectory.partial is not None for trajectory in self.members)
        for index in reissued:
            if self._reissued is None:
                self._reissued = {}
            self._reissued.setdefault(self.members[index].attempt, deque()).append(index)

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
        self.zero_variance = metric is not None and zero_variance(
            [rewards[metric] for _, outputs in self._outputs() for rewards in outputs.rewards if metric in rewards]
        )
        self._close("the group was closed without it")
        self.state = GroupState.FINISHED

    def fail(self, error: str) -> None:
        """Make the group failed, whatever its trajectories did; the finished ones keep their outputs."""
        if self.members:
            self._close(error)
        self.state = GroupState.FAILED
        self.failed = True
        self.error = error
        self.zero_variance = False

    def _outputs(self) -> list[tuple[int, Outputs]]:
        return [
            (index, trajectory.outputs)
            for index, trajectory in enumerate(self.members)
            if trajectory.outputs is not None
        ]

    def _close(self, error: str) -> None:
        outputs = self._outputs()
        self.results = b"".join([kept.encoded for _, kept in outputs])
        placed = [
            (index, position, payload)
            for index, kept in outputs
            for position, payload in kept.payloads
            if isinstance(payload, Payload)
        ]
        self.placed = tuple(placed)
        self.small = b"".join([kept.small for _, kept in outputs])
        self.small_bytes = sum([kept.small_bytes for _, kept in outputs])
        self.versions = tuple([kept.versions for _, kept in outputs if kept.versions is not None])
        odd: dict[int, Trajectory] = {}
        for index, trajectory in enumerate(self.members):
            if not trajectory.plain:
                odd[index] = trajectory
                trajectory.outputs = trajectory.partial = trajectory.done = None
                trajectory.claim_id = ""
                if trajectory.state is not TrajectoryState.FINISHED:
                    trajectory.state = TrajectoryState.FAILED
                    trajectory.error = trajectory.error or error
        self.odd = odd or NO_ODD
        self.members = ()
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
        held += [payload for _, _, payload in self.placed]
        for trajectory in self.members:
            for outputs in (trajectory.outputs, trajectory.partial):
                if outputs is not None:
                    held += outputs.kept()
        return held

    def held_here(self) -> int:
        """Bytes of the payloads that are kept with its outputs, not in a store."""
        return self.small_bytes + sum([outputs.small_bytes for _, outputs in self._outputs()])
