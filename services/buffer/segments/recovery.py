"""Finding what the segments of an earlier process hold.

Invariants: nothing but the torn end of the newest segment is changed; of two copies of a part the one in the newer
place counts, since compaction writes the second before it removes the first; a payload is found only if all of its
parts are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from services.buffer.segments.places import Places, place_of, segment_of, size_of
from services.buffer.segments.record import FILE_MAGIC, record_bytes
from services.buffer.segments.scan import Scan, records
from services.buffer.segments.segment import Segment


@dataclass(slots=True)
class Recovered:
    """What was found."""

    segments: dict[int, Segment] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    current: Segment | None = None
    """The newest segment if it may be appended to."""
    gaps: list[tuple[str, int, int]] = field(default_factory=list)
    """Damage: (file name, offset, bytes)."""


def recover(directory: Path, segment_bytes: int) -> Recovered:
    """Read every header in `directory`, which is made if it is not there. Blocks. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / "ballast").unlink(missing_ok=True)
    found = Recovered()
    # Parts of payloads that have several, or whose first or last part has not been met: start -> (place, last).
    parts: dict[str, dict[int, tuple[int, bool]]] = {}
    numbers = sorted(int(path.name.removeprefix("segment-")) for path in directory.glob("segment-*"))
    for number in numbers:
        segment = Segment(directory, number)
        found.segments[number] = segment
        newest = number == numbers[-1]
        scan = Scan()
        for header, offset in records(segment.path, scan, verify=newest):
            place = place_of(number, offset, header.size)
            if header.last and not header.start:
                found.places.add(header.payload_id, [place])
            else:
                parts.setdefault(header.payload_id, {})[header.start] = place, header.last
        found.gaps += [(segment.path.name, offset, size) for offset, size in scan.gaps]
        found.gaps += [(segment.path.name, offset, 0) for _, offset in scan.bad]
        _end(found, segment, scan.end, segment_bytes, newest=newest)
    for payload_id, pieces in parts.items():
        places = _whole(pieces)
        if places:
            found.places.add(payload_id, places)
    _count_live(found)
    return found


def _end(found: Recovered, segment: Segment, end: int, segment_bytes: int, *, newest: bool) -> None:
    """Settle where a segment ends."""
    size = segment.path.stat().st_size
    segment.size = end
    if newest:
        if end >= len(FILE_MAGIC):
            os.truncate(segment.path, end)
            segment.closed = end >= segment_bytes
        else:
            # Not even its beginning was written; whatever is there is not ours to read.
            segment.closed = True
    else:
        segment.closed = True
        if size > end:
            found.gaps.append((segment.path.name, end, size - end))
    if not segment.closed:
        found.current = segment


def _whole(pieces: dict[int, tuple[int, bool]]) -> list[int]:
    """The places of all parts in order, or nothing if one is missing."""
    places: list[int] = []
    start = 0
    while start in pieces:
        place, last = pieces[start]
        places.append(place)
        if last:
            return places
        start += size_of(place)
        if not size_of(place):
            break
    return []


def _count_live(found: Recovered) -> None:
    for payload_id, places in found.places.items():
        for place in places:
            segment = found.segments[segment_of(place)]
            segment.live += record_bytes(payload_id, size_of(place))
