"""The run's event log.

Invariants: sequence numbers begin at 1 and have no gaps; `at` never runs backwards; the newest `limit` events are kept,
fewer if they are so large that they fill the history; older ones may be trimmed, and asking for a trimmed one is an
error and never a silent gap.
"""

from collections.abc import Callable, Iterator

from services.runtime.errors import TurnoutError, out_of_range
from services.runtime.history import History, Packing
from services.scheduler.domain.events import Happening, RunEvent


class EventLog:
    """A bounded log that tells its listeners when it grew."""

    def __init__(self, limit: int, packing: Packing[RunEvent]) -> None:
        self._limit = limit
        self._packing = packing
        self._history = History(packing, 1)
        """An event's position is its sequence number."""
        self._listeners: list[Callable[[], None]] = []
        self._ended: TurnoutError | None = None

    @property
    def first(self) -> int:
        """Sequence number of the oldest event that is kept (or of the next one, if none is)."""
        return self._history.first

    @property
    def last(self) -> int:
        """Sequence number of the newest event, 0 before the first."""
        return self._history.end - 1

    @property
    def ended(self) -> bool:
        """Whether nothing is told of it any more."""
        return self._ended is not None

    def append(self, event: Happening, at: float, time: float) -> RunEvent:
        """Add an event that happened at run time `at`, unix time `time`."""
        if (before := self._history.newest) is not None:
            at = max(at, before.at)
        placed = RunEvent(self.last + 1, at, time, event)
        self._add(placed)
        for listener in tuple(self._listeners):
            listener()
        return placed

    def _add(self, placed: RunEvent) -> None:
        self._history.append(placed)
        # Trimming a share at a time keeps appending cheap.
        if len(self._history) > self._limit + self._limit // 4:
            self._history.trim(self._history.end - self._limit)

    def restore(self, first: int) -> None:
        """Begin an empty log with `first`: what came before is not kept any more."""
        if len(self._history) or self._listeners:
            raise AssertionError("only a log that nobody has used is restored")
        self._history = History(self._packing, first)

    def keep(self, placed: RunEvent) -> None:
        """Add an event that was read back. Raises ValueError unless it is the next one."""
        if placed.sequence != self.last + 1:
            raise ValueError(f"event {placed.sequence} follows event {self.last}")
        self._add(placed)

    def __iter__(self) -> Iterator[RunEvent]:
        return self._history.snapshot()

    def read(self, start: int, limit: int) -> list[RunEvent]:
        """At most `limit` events from sequence number `start` (at least 1) on.

        Raises OUT_OF_RANGE: EVENTS_TRIMMED if `start` is older than what is kept, EVENTS_AHEAD if it is above the next.
        """
        if self._ended is not None:
            raise self._ended
        if start > self.last + 1:
            raise out_of_range(
                "EVENTS_AHEAD",
                f"the next event is {self.last + 1}: these numbers are of another life of the run",
                field="from_sequence",
                value=start,
                next_sequence=self.last + 1,
            )
        if start < self.first:
            raise out_of_range(
                "EVENTS_TRIMMED",
                f"events before {self.first} are not kept any more",
                field="from_sequence",
                value=start,
                first=self.first,
            )
        return self._history.read(start, limit)

    def end(self, error: TurnoutError) -> None:
        """Nothing that this log holds is told any more; who reads it gets `error`."""
        self._ended = error
        for listener in tuple(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every event from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)
