"""Run events as the contract has them.

Invariant: an event's fields are copied by name, so a field that one side has and the other lacks fails the first test
that sends such an event and is never dropped in silence.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

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


def event_from_proto(message: events_pb2.RunEvent) -> events.RunEvent:
    """What `event_to_proto` was given. Raises ValueError for an event that this version does not know."""
    which = message.WhichOneof("event")
    if which is None:
        raise ValueError(f"event {message.sequence} is of a kind that this version does not know")
    name = "".join(part.capitalize() for part in which.split("_"))
    happened = _read(getattr(events, name), getattr(message, which))
    return events.RunEvent(message.sequence, message.at, message.time.ToNanoseconds() / 1e9, happened)


def happening_from_proto(kind: type[Any], message: Any) -> Any:
    """The happening of this kind that a message tells."""
    return _read(kind, message)


def happening_to_proto(event: events.Happening) -> Any:
    """The message of one happening alone."""
    return getattr(events_pb2, type(event).__name__)(**_values(event))


_READERS: dict[type[Any], list[tuple[str, Callable[[Any], Any]]]] = {}
"""Made once per class: a start reads a hundred thousand events."""


def _read(kind: type[Any], message: Any) -> Any:
    return kind(**{name: reader(message) for name, reader in _readers(kind)})


def _readers(kind: type[Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    """For each field of a class, what reads it from a message."""
    if kind not in _READERS:
        hints = get_type_hints(kind)
        _READERS[kind] = [(f.name, _reader(_RENAMED.get(f.name, f.name), hints[f.name])) for f in fields(kind)]
    return _READERS[kind]


def _reader(name: str, hint: Any) -> Callable[[Any], Any]:
    if isinstance(hint, UnionType):
        (present,) = (option for option in get_args(hint) if option is not type(None))
        read = _reader(name, present)
        return lambda message: read(message) if message.HasField(name) else None
    if get_origin(hint) is tuple:
        element = _element(get_args(hint)[0])
        return lambda message: tuple(map(element, getattr(message, name)))
    if get_origin(hint) is Mapping:
        return lambda message: dict(getattr(message, name))
    convert = _element(hint)
    return lambda message: convert(getattr(message, name))


def _element(kind: Any) -> Callable[[Any], Any]:
    if is_dataclass(kind):
        return lambda value: _read(kind, value)  # type: ignore[arg-type]
    if issubclass(kind, IntEnum):
        return lambda value: kind(value)
    return lambda value: value
