"""Part: one record on its way into a segment.

Invariants: it is settled once, by `written` or by `refused` of its owner, on the event loop; one that is dropped before
it was begun is settled by neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.buffer.segments.record import Header
from services.buffer.segments.segment import Segment
from services.runtime.errors import TurnoutError


class PartOwner(Protocol):
    """Who is told what became of a part."""

    def written(self, part: Part, segment: Segment, offset: int) -> None:
        """It is in `segment` at `offset`, and counted among what lives there."""

    def refused(self, part: Part, error: TurnoutError) -> None:
        """It was not written, and will not be."""


@dataclass(slots=True, eq=False)
class Part:
    """A header and its data in pieces. `patient`: it is owed to the disk, so that it stays until there is room.
    `number`: its place among all that the writer was given, from 1."""

    header: Header
    chunks: Sequence[bytes]
    owner: PartOwner
    patient: bool = False
    dropped: bool = False
    number: int = 0
