"""Events as they are written and read back."""

from __future__ import annotations

from dataclasses import fields
from enum import IntEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from services.scheduler.convert_events import event_from_proto, event_to_proto
from services.scheduler.domain import events
from turnout.scheduler.v1 import events_pb2


def sample(hint: Any, absent: bool) -> Any:
    """A value of a type; None where that may be, if `absent`."""
    if isinstance(hint, UnionType):
        return None if absent else sample(next(t for t in get_args(hint) if t is not type(None)), absent)
    if get_origin(hint) is tuple:
        return (sample(get_args(hint)[0], absent),) * 2
    if get_origin(hint) is not None:
        return {"a": 0.1, "b": -2.0}
    if issubclass(hint, IntEnum):
        return list(hint)[-1]
    if hint in (int, float, str, bool):
        return {int: 2**53 + 1, float: 0.1, str: "grüß", bool: True}[hint]
    return made(hint, absent)


def made(kind: type[Any], absent: bool) -> Any:
    hints = get_type_hints(kind)
    return kind(**{field.name: sample(hints[field.name], absent) for field in fields(kind)})


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("kind", get_args(events.Happening), ids=lambda kind: kind.__name__)
def test_every_kind_of_event_comes_back_as_it_was(kind: type[Any], absent: bool) -> None:
    """A policy that is taught from a journal must hear what the first one heard."""
    narrow = {"TopologyChanged", "TrajectoriesReissued", "TrajectoryFinished", "MiniBatchBegan", "MiniBatchEnded"}
    event = made(kind, absent)
    if kind.__name__ in narrow | {"RequestProgress", "ReplicaCounters", "GroupsAdded"}:
        event = _narrowed(event)
    placed = events.RunEvent(7, 12.345, 1_700_000_000.123456, event)
    assert event_from_proto(event_to_proto(placed)) == placed


def _narrowed(value: Any) -> Any:
    """The same with integers that int32 fields take."""
    if type(value) is int:
        return 7
    if isinstance(value, tuple):
        return tuple(map(_narrowed, value))
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{f.name: _narrowed(getattr(value, f.name)) for f in fields(value)})
    return value


def test_an_event_that_is_not_known_is_an_error() -> None:
    """It was written by a newer version; leaving it out would teach policies something else."""
    with pytest.raises(ValueError, match="does not know"):
        event_from_proto(events_pb2.RunEvent(sequence=1))
