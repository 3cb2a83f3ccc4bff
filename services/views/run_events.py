"""A run's events in a file: one JSON object a line, in protobuf's JSON form.

Invariant: what was written reads back as the same messages; a line that is none is an error that names the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf import json_format

from turnout.scheduler.v1 import events_pb2


class EventsError(ValueError):
    """A file holds no such events; the message names file and line."""


def line_of(event: events_pb2.RunEvent) -> str:
    """The event as one line, without its end. 64-bit numbers are strings, as protobuf's JSON has it."""
    return json_format.MessageToJson(event, preserving_proto_field_name=True, indent=None)


def write_events(events: Iterable[events_pb2.RunEvent], path: Path) -> None:
    """Write `path`. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(line_of(event) + "\n" for event in events)


def read_events(path: Path) -> Iterator[events_pb2.RunEvent]:
    """Yield the events of `path`, in its order. Raises EventsError."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                event = events_pb2.RunEvent()
                try:
                    json_format.Parse(line, event)
                except json_format.ParseError as error:
                    raise EventsError(f"{path}, line {number}: no run event: {error}") from error
                if not event.sequence:
                    raise EventsError(f"{path}, line {number}: no run event: it has no sequence")
                yield event
    except (OSError, UnicodeDecodeError) as error:
        raise EventsError(f"{path}: cannot be read: {error}") from error
