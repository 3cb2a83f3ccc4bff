"""How many tokens a trajectory has decoded over all its turns, and which are between two of them.

A trajectory that calls tools is one request after the other, each of which counts from 0; what its lengths are learned
from, and how far it is, is the sum.

Invariants: a request that goes on elsewhere keeps what it has, so it is no turn of its own; several requests of one
trajectory at a time each count with all turns that ended; what is kept of a group goes with it, also if a reading that
was on its way, or an engine that has not ended its requests yet, still tells of it. A trajectory without a request is
between two turns until it finishes; where nothing ever took a second turn, it is done, and about to be told so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from turnout.engine.v1 import engine_pb2

_Trajectory: TypeAlias = tuple[int, int]
"""Position in its group, and attempt."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A turn that runs, in tokens."""

    prompt: int
    output: int


@dataclass(slots=True)
class _Turns:
    """ended: tokens of the turns that are over; present: those that run, by the engine's id."""

    ended: int = 0
    present: dict[str, _Request] = field(default_factory=dict)


@dataclass(slots=True)
class _Group:
    """members: those that were seen running. settled: positions of those that finished."""

    members: dict[_Trajectory, _Turns] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)


class Turns:
    """The trajectories of one run that were seen running."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._running: set[tuple[str, int, int]] = set()
        self._several = False
        """Whether any trajectory took a second turn."""
        self._gone: set[str] = set()
        """Groups that were forgotten since the last reading, or that it still told of."""
        self._reading = False

    def read(self, requests: Iterable[engine_pb2.RequestProgress]) -> None:
        """Take in all requests that run now."""
        self._reading = True
        running: dict[tuple[str, int, int], dict[str, _Request]] = {}
        late: set[str] = set()
        for request in requests:
            key = request.join_key
            if key.group_id in self._gone:
                late.add(key.group_id)
                continue
            present = running.setdefault((key.group_id, key.trajectory, key.attempt), {})
            present[request.engine_request_id] = _Request(request.prompt_tokens, request.output_tokens)
        self._gone = late
        for (group, trajectory, attempt), present in running.items():
            members = self._groups.setdefault(group, _Group()).members
            turns = members.setdefault((trajectory, attempt), _Turns())
            if present.keys() != turns.present.keys():
                ended = _ended(turns.present, present)
                turns.ended += ended
                self._several = self._several or ended > 0
            turns.present = present
        self._running = set(running)

    def before(self, key: engine_pb2.JoinKey) -> int:
        """Tokens of the turns of a trajectory that are over."""
        group = self._groups.get(key.group_id)
        turns = None if group is None else group.members.get((key.trajectory, key.attempt))
        return 0 if turns is None else turns.ended

    def between(self) -> Iterator[tuple[str, int, int]]:
        """Group, position and tokens of the trajectories that the last reading did not show and that have not finished:
        a tool works for them."""
        if not self._several:
            return
        for name, group in self._groups.items():
            latest: dict[int, int] = {}
            for index, attempt in group.members:
                latest[index] = max(attempt, latest.get(index, attempt))
            for index, attempt in latest.items():
                if index not in group.settled and (name, index, attempt) not in self._running:
                    turns = group.members[index, attempt]
                    yield name, index, turns.ended + sum(turn.output for turn in turns.present.values())

    def knows(self, group_id: str, index: int) -> bool:
        """Whether a request of the trajectory was ever seen."""
        group = self._groups.get(group_id)
        return group is not None and any(position == index for position, _ in group.members)

    def settle(self, group_id: str, index: int) -> None:
        """The trajectory finished; a reading may be late and show it once more."""
        if group_id in self._groups:
            self._groups[group_id].settled.add(index)

    def forget(self, group_id: str) -> None:
        """The group is finished, or gone."""
        self._groups.pop(group_id, None)
        if self._reading:
            self._gone.add(group_id)


def _ended(before: dict[str, _Request], now: dict[str, _Request]) -> int:
    """Tokens of the requests that ended between two readings in both of which the trajectory ran."""
    new = sorted((turn for name, turn in now.items() if name not in before), key=_output, reverse=True)
    ended = 0
    for turn in sorted((turn for name, turn in before.items() if name not in now), key=_output, reverse=True):
        # It may go on under another id, on another replica. A turn that follows has this one's output in its prompt.
        again = next((one for one in new if one.prompt == turn.prompt and one.output >= turn.output), None)
        if again is None:
            ended += turn.output
        else:
            new.remove(again)
    return ended


def _output(turn: _Request) -> int:
    return turn.output
