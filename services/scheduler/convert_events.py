"""Run events as the contract has them.

Invariant: an event's fields are copied by name, so a field that one side has and the other lacks fails the first test
that sends such an event and is never dropped in silence.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from services.scheduler.domain import events
from turnout.scheduler.v1 import events_pb2

_RENAMED = {"before": "from"}
"""`from` is a word Python keeps for itself."""


def timestamp(unix_s: float) -> Timestamp:
    """A protobuf Timestamp of unix time."""
    stamp = Timestamp()
    stamp.FromNanoseconds(round(unix_s * 1e6) * 1000)
    return stamp


def event_to_proto(placed: events.RunEvent) -> events_pb2.RunEvent:
    """One event with its place in the run."""
    name = type(placed.event).__name__
    field = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    message = events_pb2.RunEvent(sequence=placed.sequence, at=placed.at, time=timestamp(placed.time))
    getattr(message, field).CopyFrom(getattr(events_pb2, name)(**_values(placed.event)))
    return message


def _values(event: Any) -> dict[str, Any]:
    values = {_RENAMED.get(f.name, f.name): _value(getattr(event, f.name)) for f in fields(event)}
    return {name: value for name, value in values.items() if value is not None}


def _value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value):
        return getattr(events_pb2, type(value).__name__)(**_values(value))
    return value
