"""How old events of a run are kept in little memory.

Invariant: an event that was packed is told as it would have been told before.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from services.runtime.history import Packing
from services.scheduler.convert_events import event_from_proto, event_to_proto
from services.scheduler.domain.events import RequestProgress, RunEvent
from turnout.scheduler.v1 import scheduler_pb2


def weight(placed: RunEvent) -> int:
    """Return what an event is worth in small ones: a reading tells of each running request."""
    return 1 + (len(placed.event.requests) if isinstance(placed.event, RequestProgress) else 0)


def _pack(events: Sequence[RunEvent]) -> bytes:
    message = scheduler_pb2.WatchRunResponse(events=map(event_to_proto, events))
    return zlib.compress(message.SerializeToString(), level=1)


def _unpack(packed: bytes) -> list[RunEvent]:
    message = scheduler_pb2.WatchRunResponse.FromString(zlib.decompress(packed))
    return list(map(event_from_proto, message.events))


PACKING: Final = Packing(_pack, _unpack, weight)
