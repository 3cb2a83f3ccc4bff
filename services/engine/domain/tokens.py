"""Output tokens as the stretches in which they came.

Invariants: stretches are only appended and never changed, so a snapshot stays what it was; nothing here copies or
looks at single tokens, since outputs of ten thousand tokens pass through a controller by the hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", int, float)


class Stretches(Generic[T]):
    """A growing sequence of values, in stretches."""

    def __init__(self, stretches: Iterable[Sequence[T]] = ()) -> None:
        self._stretches: list[Sequence[T]] = [stretch for stretch in stretches if stretch]
        self._length = sum(len(stretch) for stretch in self._stretches)

    def __len__(self) -> int:
        return self._length

    def append(self, stretch: Sequence[T]) -> None:
        """Add a stretch, which must not be changed afterwards."""
        if stretch:
            self._stretches.append(stretch)
            self._length += len(stretch)

    @property
    def count(self) -> int:
        """How many stretches there are."""
        return len(self._stretches)

    def since(self, count: int = 0) -> list[Sequence[T]]:
        """The stretches after the first `count`."""
        return self._stretches[count:]

    def snapshot(self) -> Stretches[T]:
        """What there is now, in an object of its own."""
        copy = Stretches[T]()
        copy._stretches, copy._length = list(self._stretches), self._length
        return copy
