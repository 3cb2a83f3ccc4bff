"""Places: where each payload is, in as little memory as it takes.

Invariants: a payload is here only if all of its parts are. A place is one integer, a payload of one part one place;
hundreds of thousands of small payloads are the common case.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

_OFFSET_BITS: Final = 40
_SIZE_BITS: Final = 32


def place_of(segment: int, offset: int, size: int) -> int:
    """Pack the position of a record and the size of its data."""
    return (segment << _OFFSET_BITS | offset) << _SIZE_BITS | size


def segment_of(place: int) -> int:
    """Number of the segment."""
    return place >> (_OFFSET_BITS + _SIZE_BITS)


def offset_of(place: int) -> int:
    """Offset of the record in its segment."""
    return (place >> _SIZE_BITS) & ((1 << _OFFSET_BITS) - 1)


def size_of(place: int) -> int:
    """Size of the data."""
    return place & ((1 << _SIZE_BITS) - 1)


class _Parts:
    """The places of a payload of several parts, in order, and where each begins in the payload."""

    __slots__ = ("places", "starts")

    def __init__(self, places: list[int]) -> None:
        self.places = places
        self.starts = [0]
        for place in places[:-1]:
            self.starts.append(self.starts[-1] + size_of(place))


class Places:
    """Places by payload id."""

    def __init__(self) -> None:
        self._of: dict[str, int | _Parts] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, payload_id: object) -> bool:
        return payload_id in self._of

    def add(self, payload_id: str, places: list[int]) -> None:
        """Enter a payload by its parts in order."""
        self._of[payload_id] = places[0] if len(places) == 1 else _Parts(places)

    def pop(self, payload_id: str) -> Iterable[int]:
        """Take a payload out; returns its places, none if it was not here."""
        found = self._of.pop(payload_id, None)
        if found is None:
            return ()
        return found.places if isinstance(found, _Parts) else (found,)

    def find(self, payload_id: str, offset: int) -> tuple[int, int] | None:
        """The place of the part that holds `offset`, and where that part begins; None if the payload is not here."""
        found = self._of.get(payload_id)
        if found is None:
            return None
        if not isinstance(found, _Parts):
            return found, 0
        position = bisect_right(found.starts, offset) - 1
        return found.places[position], found.starts[position]

    def is_at(self, payload_id: str, start: int, place: int) -> bool:
        """Whether the part that begins at `start` is at `place`."""
        return self.find(payload_id, start) == (place, start)

    def move(self, payload_id: str, start: int, place: int) -> None:
        """A part that is here lies elsewhere now."""
        found = self._of[payload_id]
        if isinstance(found, _Parts):
            found.places[bisect_right(found.starts, start) - 1] = place
        else:
            self._of[payload_id] = place

    def ids(self) -> Iterator[str]:
        """Every id."""
        return iter(self._of)

    def items(self) -> Iterator[tuple[str, Iterable[int]]]:
        """Every id with its places."""
        for payload_id, found in self._of.items():
            yield payload_id, found.places if isinstance(found, _Parts) else (found,)

    def rekey(self, ids: Iterable[str]) -> None:
        """Keep exactly these, which are here, under the strings given, so that both sides share them."""
        self._of = {payload_id: self._of[payload_id] for payload_id in ids}
