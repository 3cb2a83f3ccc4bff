"""The lends of a run.

Invariants: an id is used for one lend; at most one lend is open; a lend that is complete or abandoned stays so; the
newest `CLOSED_KEPT` of those are remembered, so that closing one again is told apart from closing one that never was.
"""

from dataclasses import dataclass
from typing import Final

from services.runtime.errors import TurnoutError, failed_precondition, not_found
from services.scheduler.domain.events import LendKind

CLOSED_KEPT: Final = 1000
"""As many as the engine controller keeps: a trainer repeats the closing of its last lend, rarely of an older one."""


@dataclass(slots=True)
class Lend:
    """One lend.

    begin_s: seconds that BeginLend took. begun: the controller holds it open. replica_ids: replicas that wait for
    weights. allow_older: engines may hold newer weights than `weight_version`, after a roll-back. ordered_at: when the
    order that is under way at the controller, its begin or its end, was given.
    """

    lend_id: str
    kind: LendKind
    weight_version: int
    allow_older: bool = False
    begin_s: float = 0.0
    begun: bool = False
    replica_ids: tuple[str, ...] = ()
    ordered_at: float | None = None

    @property
    def update_standalone(self) -> bool:
        """Whether standalone replicas are to be updated before the hybrids: not when they hold that version already."""
        return self.kind in (LendKind.INIT, LendKind.STEP_END)

    @property
    def counted(self) -> bool:
        """Whether its cost says what the next lend will cost: engines are cold at the start, and validation is no lend
        that the trainer waits for."""
        return self.kind in (LendKind.STEP_END, LendKind.WITHIN_STEP)


class Lends:
    """All lends of one run, in every epoch."""

    def __init__(self) -> None:
        self.open: Lend | None = None
        self._closed: dict[str, float | None] = {}
        self.completed = 0
        """Lends completed, validation apart."""

    def restore(self, open_lend: Lend | None, completed: int) -> None:
        """Go on with what is known of an earlier process."""
        self.open = open_lend
        self.completed = completed

    def close(self, lend_id: str, cost_s: float | None) -> None:
        """A lend is over; `cost_s` None: it was abandoned."""
        self._closed[lend_id] = cost_s
        while len(self._closed) > CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]

    def closed(self) -> dict[str, float | None]:
        """What each lend that is over cost, None if it was abandoned; the newest `CLOSED_KEPT`, oldest first."""
        return dict(self._closed)

    def begin(self, lend: Lend) -> None:
        """Open `lend`."""
        if self.open is not None or lend.lend_id in self._closed:
            raise AssertionError(f"lend {lend.lend_id} cannot begin while {self.open} is open")
        self.open = lend

    def get(self, lend_id: str) -> Lend | None:
        """The open lend `lend_id`; None if it is closed. Raises NOT_FOUND / LEND_UNKNOWN."""
        if self.open is not None and self.open.lend_id == lend_id:
            return self.open
        if lend_id in self._closed:
            return None
        raise not_found("LEND_UNKNOWN", f"no lend {lend_id!r}", field="lend_id", value=lend_id)

    def require(self, lend_id: str) -> Lend:
        """The open lend `lend_id`. Raises NOT_FOUND / LEND_UNKNOWN, FAILED_PRECONDITION / LEND_CLOSED."""
        lend = self.get(lend_id)
        if lend is None:
            raise lend_closed(lend_id, "abandoned" if self.cost_of(lend_id) is None else "completed")
        return lend

    def was_open(self, lend_id: str) -> bool:
        """Whether `lend_id` was begun and is over."""
        return lend_id in self._closed

    def cost_of(self, lend_id: str) -> float | None:
        """Seconds that a closed lend cost, None if it was abandoned."""
        return self._closed[lend_id]

    def complete(self, cost_s: float) -> None:
        """The open lend is complete, and cost so many seconds."""
        lend = self._close(cost_s)
        self.completed += lend.kind is not LendKind.VALIDATION

    def abandon(self) -> None:
        """The open lend came to nothing."""
        self._close(None)

    def _close(self, cost_s: float | None) -> Lend:
        lend = self.open
        if lend is None:
            raise AssertionError("no lend is open")
        self.open = None
        self.close(lend.lend_id, cost_s)
        return lend


def lend_closed(lend_id: str, how: str) -> TurnoutError:
    """The error for closing a lend that was closed the other way; `how`: "completed" or "abandoned"."""
    return failed_precondition(
        "LEND_CLOSED", f"lend {lend_id!r} was {how} already", field="lend_id", value=lend_id, closed=how
    )
