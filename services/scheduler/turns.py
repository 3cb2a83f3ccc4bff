"""How many tokens a trajectory has decoded over all its turns.

A trajectory that calls tools is one request after the other, each of which counts from 0; what its lengths are learned
from, and how far it is, is the sum.

Invariants: a request that goes on elsewhere keeps what it has, so it is no turn of its own; several requests of one
trajectory at a time each count with all turns that ended; what is kept of a group goes with it, also if a reading that
was on its way, or an engine that has not ended its requests yet, still tells of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from turnout.engine.v1 import engine_pb2

_Trajectory: TypeAlias = tuple[int, int]
"""Position in its group, and attempt."""


@dataclass(slots=True)
class _Turns:
    """ended: tokens of the turns that are over; present: tokens of those that run, by the engine's id."""

    ended: int = 0
    present: dict[str, int] = field(default_factory=dict)


class Turns:
    """The trajectories of one run that were seen running."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[_Trajectory, _Turns]] = {}
        self._gone: set[str] = set()
        """Groups that were forgotten since the last reading, or that it still told of."""
        self._reading = False

    def read(self, requests: Iterable[engine_pb2.RequestProgress]) -> None:
        """Take in all requests that run now."""
        self._reading = True
        running: dict[tuple[str, int, int], dict[str, int]] = {}
        late: set[str] = set()
        for request in requests:
            key = request.join_key
            if key.group_id in self._gone:
                late.add(key.group_id)
                continue
            present = running.setdefault((key.group_id, key.trajectory, key.attempt), {})
            present[request.engine_request_id] = request.output_tokens
        self._gone = late
        for (group, trajectory, attempt), present in running.items():
            turns = self._groups.setdefault(group, {}).setdefault((trajectory, attempt), _Turns())
            if present.keys() != turns.present.keys():
                turns.ended += _ended(turns.present, present)
            turns.present = present

    def before(self, key: engine_pb2.JoinKey) -> int:
        """Tokens of the turns of a trajectory that are over."""
        turns = self._groups.get(key.group_id, {}).get((key.trajectory, key.attempt))
        return 0 if turns is None else turns.ended

    def forget(self, group_id: str) -> None:
        """The group is finished, or gone."""
        self._groups.pop(group_id, None)
        if self._reading:
            self._gone.add(group_id)


def _ended(before: dict[str, int], now: dict[str, int]) -> int:
    """Tokens of the requests that ended between two readings in both of which the trajectory ran."""
    new = sorted((tokens for name, tokens in now.items() if name not in before), reverse=True)
    ended = 0
    for tokens in sorted((tokens for name, tokens in before.items() if name not in now), reverse=True):
        if new and new[0] >= tokens:
            # It goes on under another id, on another replica.
            new.pop(0)
        else:
            ended += tokens
    return ended
