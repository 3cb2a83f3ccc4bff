"""Which groups are on their way, and how far each member is.

Invariants: a group is here from its addition until it finished or failed; a reading replaces the one before, and a
member that was running and is in neither settled at its last known length, until a reading shows it again; a message
that names finished members only is no reading.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from math import log

import numpy as np

from services.scheduler.policies.jit.lengths import Snapshot
from services.scheduler.policies.types import GroupsAdded, Pool, RequestKey, RequestProgress, RequestState


@dataclass(slots=True)
class _Group:
    size: int
    serial: int
    settled: dict[int, int] = field(default_factory=dict)
    running: dict[int, RequestState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InFlight:
    """All groups at one moment. hybrid: by unsettled member, whether it runs on a hybrid replica. fresh: groups of
    which nothing runs yet. coverage: share of running requests that the reading shows."""

    at: float
    names: tuple[str, ...]
    keys: tuple[RequestKey, ...]
    snapshot: Snapshot
    hybrid: np.ndarray[tuple[int], np.dtype[np.bool_]]
    running: np.ndarray[tuple[int], np.dtype[np.bool_]]
    fresh: tuple[str, ...]

    def members(self, name: str) -> slice | None:
        """Where a group's unsettled members are; None if it was not running."""
        if name not in self.names:
            return None
        index = self.names.index(name)
        first = self.snapshot.first
        return slice(int(first[index]), int(first[index + 1]) if index + 1 < len(first) else len(self.keys))


class Groups:
    """Follows additions, readings and ends."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: dict[str, _Group] = {}
        # Left since the last reading, or told of by it all the same: it was on its way, or an engine is slow to stop.
        self._gone: set[str] = set()
        self._serial = 0
        self.read_at: float | None = None
        self.coverage = 0.0
        self.tokens = 0
        """Tokens of all running requests, as of the last reading."""
        self.hybrid_tokens = 0
        """Those on hybrid replicas."""

    def __len__(self) -> int:
        return len(self._groups)

    def has(self, group: str) -> bool:
        """Whether the group is in flight."""
        return group in self._groups

    @property
    def decoding(self) -> bool:
        """Whether anything that the last reading showed is still on its way."""
        return any(group.running for group in self._groups.values())

    def clear(self) -> None:
        """Forget all groups: another life of the run begins. What runs is in the next reading."""
        self._groups.clear()
        self._gone.clear()
        self.read_at, self.coverage = None, 0.0

    def added(self, event: GroupsAdded) -> None:
        """Groups were admitted."""
        for group in event.groups:
            self._groups[group.group] = self._new(group.size)
            self._gone.discard(group.group)

    def _new(self, size: int) -> _Group:
        self._serial += size + 1
        return _Group(size, self._serial)

    def left(self, group: str) -> None:
        """A group finished or failed."""
        self._groups.pop(group, None)
        if self.read_at is not None:
            self._gone.add(group)

    def progress(self, event: RequestProgress) -> None:
        """A reading."""
        groups = self._groups
        running: dict[str, dict[int, RequestState]] = {}
        finished = 0
        late: set[str] = set()
        for state in event.requests:
            key = state.key
            if state.finished:
                finished += 1
                group = groups.get(key.group)
                if group is not None:
                    group.settled[key.trajectory] = state.tokens
                    group.running.pop(key.trajectory, None)
            elif key.group in self._gone:
                late.add(key.group)
            elif (members := running.get(key.group)) is None:
                running[key.group] = {key.trajectory: state}
            else:
                members[key.trajectory] = state
        if finished and not running and not late:
            return
        self._gone = late
        for name, group in groups.items():
            now = running.pop(name, None) or {}
            if group.running:
                for trajectory, state in group.running.items():
                    if trajectory not in now:
                        group.settled.setdefault(trajectory, state.tokens)
            if now and group.settled:
                for trajectory in now:
                    group.settled.pop(trajectory, None)
            group.running = now
        for name, now in running.items():
            # Added before this policy began to look.
            groups[name] = self._new(max(self._size, len(now)))
            groups[name].running = now
        self.read_at = event.at
        self.coverage = event.covered_share
        self.tokens = sum([state.tokens for state in event.requests if not state.finished])
        self.hybrid_tokens = sum([state.tokens for state in event.requests if state.pool is Pool.HYBRID])

    def in_flight(self) -> InFlight:
        """All groups as of the last reading."""
        names: list[str] = []
        fresh: list[str] = []
        states: list[RequestState] = []
        first: list[int] = []
        serial: list[int] = []
        group_serial: list[int] = []
        settled: list[int] = []
        level: list[float] = []
        for name, group in self._groups.items():
            running = group.running
            if not running and not group.settled:
                fresh.append(name)
                continue
            names.append(name)
            first.append(len(states))
            group_serial.append(group.serial)
            settled.append(len(group.settled))
            level.append(_mean_log(group.settled))
            states += running.values()
            begin = group.serial + 1
            serial += [begin + trajectory for trajectory in running]
            waiting = max(group.size - len(group.settled) - len(running), 0)
            # All settled, and the group's end is on its way: one member that is as good as complete.
            for index in range(waiting if running or waiting else 1):
                states.append(RequestState(key=RequestKey(name, -1), tokens=0, replica="", pool=Pool.STANDALONE))
                serial.append(group.serial + group.size - index)
        tokens = np.array([state.tokens for state in states], dtype=np.float64)
        keys = tuple(state.key for state in states)
        members = [end - begin for begin, end in pairwise([*first, len(states)])]
        snapshot = Snapshot(
            settled=np.array(settled, dtype=np.float64),
            settled_level=np.array(level, dtype=np.float64),
            first=np.array(first, dtype=np.int64),
            tokens=tokens,
            group=np.repeat(np.arange(len(names)), members),
            group_serial=np.array(group_serial, dtype=np.int64),
            serial=np.array(serial, dtype=np.int64),
        )
        return InFlight(
            at=self.read_at or 0.0,
            names=tuple(names),
            keys=keys,
            snapshot=snapshot,
            hybrid=np.array([state.pool is Pool.HYBRID for state in states], dtype=np.bool_),
            running=np.array([key.trajectory >= 0 for key in keys], dtype=np.bool_),
            fresh=tuple(fresh),
        )


def _mean_log(settled: dict[int, int]) -> float:
    if not settled:
        return 0.0
    return sum(log(max(tokens, 1)) for tokens in settled.values()) / len(settled)
