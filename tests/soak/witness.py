"""A witness: follows what happens to the groups of one run, through the same proxy and the same restarts.

Invariant: it has every event once and in order; a gap or a repeat in the sequence is kept as a fault.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from tests.soak.errand import OPTIONS, PAUSE_S
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import AsyncBufferClient, TurnoutError, Unavailable

_PREFIX: Final = len("GROUP_EVENT_KIND_")


@dataclass(frozen=True, slots=True)
class Seen:
    """One event."""

    kind: str
    """ADDED, EVICTED, ..."""
    group_id: str
    index: int = -1
    """Of the trajectory, for TRAJECTORY_FINISHED."""


@dataclass(slots=True)
class Witness:
    """What was seen of one run."""

    run_id: str
    events: list[Seen] = field(default_factory=list)
    sequence: int = 0
    """Of the last event."""
    faults: list[str] = field(default_factory=list)

    def take(self, event: pb.GroupEvent) -> None:
        """Note an event."""
        if not event.sequence:
            return
        if event.sequence != self.sequence + 1:
            self.faults.append(f"event {event.sequence} of {self.run_id} came after event {self.sequence}")
        self.sequence = event.sequence
        kind = pb.GroupEventKind.Name(event.kind)[_PREFIX:]
        self.events.append(Seen(kind, event.group_id, event.index if event.HasField("index") else -1))

    async def follow(self, target: str) -> None:
        """Watch until cancelled."""
        async with AsyncBufferClient(target, OPTIONS) as client:
            while True:
                request = pb.WatchGroupsRequest(run_id=self.run_id, from_sequence=self.sequence + 1)
                try:
                    async for event in client.watch_groups(request):
                        self.take(event)
                except Unavailable:
                    await asyncio.sleep(PAUSE_S)
                except TurnoutError as error:
                    self.faults.append(f"watching the groups of {self.run_id} ended {error}")
                    await asyncio.sleep(PAUSE_S)
