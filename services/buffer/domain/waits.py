"""WaitBook: who waits in a partition, in the order in which they can be met.

Invariants: waits are kept per step, since depth is per step, and within a step by (target, arrival), so that what a
change of depth ends is a prefix or a suffix; a wait that ended is no longer in the book.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from services.buffer.domain.depth import Depth
from services.buffer.domain.evictions import EvictionSummary
from services.buffer.domain.leases import Lease


class WaitOutcome(Enum):
    """How a wait ended; the numbers are those of the wire."""

    REACHED = 1
    TIMED_OUT = 2
    EXHAUSTED = 3
    HELD = 4


@dataclass(slots=True, eq=False)
class Wait:
    """One parked call. `trainer`: it may evict and is shown refill claims; otherwise it only watches."""

    order: int
    step: int
    target: int
    cursor: int
    trainer: bool
    epoch: int = 0
    sample: bool = False
    auto_commit: bool = False
    request_id: str = ""
    fingerprint: bytes = b""
    closed: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Place in the order of its step."""
        return self.target, self.order


@dataclass(frozen=True, slots=True)
class WaitEnd:
    """The final event of a wait."""

    outcome: WaitOutcome
    depth: Depth
    evictions: EvictionSummary
    next_cursor: int
    reason: str = ""
    lease: Lease | None = None


class StepWaits:
    """The waits of one step: those that watch a target and those that sample, each by (target, arrival)."""

    __slots__ = ("samples", "watches")

    def __init__(self) -> None:
        self.watches: list[Wait] = []
        self.samples: list[Wait] = []

    def __bool__(self) -> bool:
        return bool(self.watches or self.samples)

    def of(self, wait: Wait) -> list[Wait]:
        """The list a wait belongs to."""
        return self.samples if wait.sample else self.watches


class WaitBook:
    """The waits of a partition."""

    __slots__ = ("_next_order", "_steps", "_trainer_steps", "trainers")

    def __init__(self) -> None:
        self._steps: dict[int, StepWaits] = {}
        self._next_order = 1
        self.trainers: OrderedDict[int, Wait] = OrderedDict()
        self._trainer_steps: Counter[int] = Counter()

    def next_order(self) -> int:
        """The number of the next wait."""
        order = self._next_order
        self._next_order += 1
        return order

    def add(self, wait: Wait) -> None:
        """Enter a new wait."""
        insort(self._steps.setdefault(wait.step, StepWaits()).of(wait), wait, key=lambda entry: entry.key)
        if wait.trainer:
            self.trainers[wait.order] = wait
            self._trainer_steps[wait.step] += 1

    def remove(self, wait: Wait) -> None:
        """Take a wait out, if it is in."""
        if self.trainers.pop(wait.order, None) is not None:
            self._trainer_steps[wait.step] -= 1
            if not self._trainer_steps[wait.step]:
                del self._trainer_steps[wait.step]
        step = self._steps.get(wait.step)
        if step is None:
            return
        waits = step.of(wait)
        place = bisect_left(waits, wait.key, key=lambda entry: entry.key)
        if place < len(waits) and waits[place] is wait:
            del waits[place]
            if not step:
                del self._steps[wait.step]

    def highest_trainer_step(self) -> int | None:
        """The highest step that a trainer waits for; None if none waits."""
        return max(self._trainer_steps, default=None)

    def steps(self) -> list[tuple[int, StepWaits]]:
        """The waits by step, lowest step first."""
        return sorted(self._steps.items(), key=lambda item: item[0])

    def __iter__(self) -> Iterator[Wait]:
        for _, step in self.steps():
            yield from step.watches
            yield from step.samples
