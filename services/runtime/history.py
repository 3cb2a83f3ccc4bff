"""A long history in little memory: its newest items as they are, older ones packed.

Why: events are kept for who comes late, and hardly ever read. As objects they take some three hundred bytes each,
packed with their neighbours some ten.

Invariants: positions count from 0 and never change; an item comes out as it went in; what is packed was packed once, in
one piece that takes some milliseconds; the newest item is never packed; of what is packed at most `max_bytes` are kept,
the oldest going first. Pure: how items are packed is passed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

BLOCK_WEIGHT: Final = 128
"""Packed at once: one to five milliseconds for as many small events, by what has to be converted."""

FRESH_WEIGHT: Final = 1024
"""Kept as they are, at least: more than who follows is ever behind."""

MAX_BYTES: Final = 64 << 20
"""Of packed items: some millions of small ones. Large ones must not fill the memory before they are many."""


@dataclass(frozen=True, slots=True)
class Packing(Generic[T]):
    """How items become bytes and come back."""

    pack: Callable[[Sequence[T]], bytes]
    unpack: Callable[[bytes], list[T]]
    weight: Callable[[T], int] = lambda _: 1
    """What an item is worth in small ones, at least 1."""


class History(Generic[T]):
    """Items in order. `first` is the position of the oldest that is kept, `end` that of the next one.

    `packed_bytes` is the memory of what is packed.
    """

    __slots__ = (
        *("_blocks", "_fresh_weight", "_max_bytes", "_newest", "_opened", "_packing", "_starts", "_weight"),
        *("end", "first", "packed_bytes"),
    )

    def __init__(
        self,
        packing: Packing[T],
        first: int = 0,
        *,
        fresh_weight: int = FRESH_WEIGHT,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """An empty history whose next item has the position `first`."""
        self._packing = packing
        self._fresh_weight = fresh_weight
        self._max_bytes = max_bytes
        self._blocks: list[bytes] = []
        self._starts: list[int] = []
        """Position of the first item of each block."""
        self._newest: list[T] = []
        self._weight = 0
        """Of the newest."""
        self._opened: tuple[int, list[T]] | None = None
        """The block that was read last, by its start: who reads all of it comes again and again."""
        self.first = first
        self.end = first
        self.packed_bytes = 0

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def newest(self) -> T | None:
        """The last item."""
        return self._newest[-1] if self._newest else None

    @property
    def unpacked(self) -> int:
        """Items that are kept as they are."""
        return len(self._newest)

    @property
    def _unpacked_from(self) -> int:
        return self.end - len(self._newest)

    def append(self, item: T) -> None:
        """Add an item."""
        self._newest.append(item)
        self.end += 1
        self._weight += self._packing.weight(item)
        if self._weight >= self._fresh_weight + BLOCK_WEIGHT and len(self._newest) > 1:
            self._pack_oldest()

    def read(self, position: int, count: int) -> list[T]:
        """At most `count` items from `position` on, which has to be `first` or behind it."""
        items: list[T] = []
        unpacked_from = self._unpacked_from
        while count > 0 and position < unpacked_from:
            which = bisect_right(self._starts, position) - 1
            offset = position - self._starts[which]
            some = self._open(which)[offset : offset + count]
            items += some
            position += len(some)
            count -= len(some)
        if count > 0:
            begin = position - unpacked_from
            items += self._newest[begin : begin + count]
        return items

    def trim(self, first: int) -> None:
        """Keep nothing before `first`, which is `end` at most."""
        if first <= self.first:
            return
        self.first = first
        while self._starts and first >= self._end_of_oldest():
            self._drop_oldest()
        if not self._starts:
            excess = len(self._newest) - len(self)
            self._weight -= sum(map(self._packing.weight, self._newest[:excess]))
            del self._newest[:excess]

    def snapshot(self) -> Iterator[T]:
        """The items of now, oldest first, however the history goes on; unpacked as they are asked for."""
        skip = self.first - (self._starts[0] if self._starts else self.first)
        return self._each(list(self._blocks), list(self._newest), skip)

    def _each(self, blocks: list[bytes], newest: list[T], skip: int) -> Iterator[T]:
        for number, block in enumerate(blocks):
            yield from self._packing.unpack(block)[skip if number == 0 else 0 :]
        yield from newest

    def _open(self, which: int) -> list[T]:
        start = self._starts[which]
        if self._opened is None or self._opened[0] != start:
            self._opened = (start, self._packing.unpack(self._blocks[which]))
        return self._opened[1]

    def _pack_oldest(self) -> None:
        weight = count = 0
        while weight < BLOCK_WEIGHT and count < len(self._newest) - 1:
            weight += self._packing.weight(self._newest[count])
            count += 1
        self._starts.append(self._unpacked_from)
        self._blocks.append(self._packing.pack(self._newest[:count]))
        self.packed_bytes += len(self._blocks[-1])
        del self._newest[:count]
        self._weight -= weight
        while self.packed_bytes > self._max_bytes:
            self.first = max(self.first, self._end_of_oldest())
            self._drop_oldest()

    def _end_of_oldest(self) -> int:
        return self._starts[1] if len(self._starts) > 1 else self._unpacked_from

    def _drop_oldest(self) -> None:
        self.packed_bytes -= len(self._blocks[0])
        del self._blocks[0], self._starts[0]
